"""Actors that rank 0 starts, and that every rank of the run reaches by their names."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import LightRFTVisualError
from ...runtime import collectives
from .cluster import AUTH_MODE, connect

NAMESPACE = "lightrft_visual"
START_SECONDS = 600.0  # of an actor: imports and a large checkpoint


def named_actors(ray: Any, kind: type, prefix: str, options: Sequence[Mapping[str, Any]], *arguments: Any) -> dict:
    """Actors of a class by their names; those that end start again.

    Args:
        ray: the module, connected.
        kind: the class.
        prefix: with which the names begin; the rest makes them unique in the cluster.
        options: Ray's, of each actor: there are as many actors.
        arguments: of the class, the same for all.
    """
    factory, run = ray.remote(kind), uuid.uuid4().hex[:8]
    usual = {"namespace": NAMESPACE, "max_restarts": -1, "max_task_retries": 0}
    return {
        name: factory.options(name=name, **usual, **own).remote(*arguments)
        for name, own in ((f"{prefix}_{run}_{number}", own) for number, own in enumerate(options))
    }


def on_every_rank(start: Callable[[], tuple[Any, dict[str, Any]]], needed_for: str) -> tuple[Any, dict[str, Any]]:
    """(ray, actors by name), which `start` makes on rank 0. A collective; what fails there is raised on every rank."""
    address, actors, error = None, {}, None
    if collectives.is_rank_0():
        try:
            ray, actors = start()
            address = ray.get_runtime_context().gcs_address
        except LightRFTVisualError as failure:
            error = failure
    told = address, list(actors), os.environ.get(AUTH_MODE), error
    address, names, mode, error = collectives.broadcast_object(told)
    if error is not None:
        raise error
    if not collectives.is_rank_0():
        ray = connect(needed_for, address=address, authentication=mode)
        actors = {name: ray.get_actor(name, namespace=NAMESPACE) for name in names}
    return ray, actors
