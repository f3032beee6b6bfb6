"""Actors that rank 0 starts, and that every rank of the run reaches by their names."""

import os
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import LightRFTVisualError
from ...runtime import collectives
from .cluster import AUTH_MODE, connect

NAMESPACE = "lightrft_visual"
TRIES = 5  # to build an actor that was started again
RETRY_SECONDS = 5.0  # before the next one: what took its room may be gone by then
START_SECONDS = 600.0  # of an actor, at least: imports and a large checkpoint


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
    collectives.meet()  # for however long the actors take
    told = address, list(actors), os.environ.get(AUTH_MODE), error
    address, names, mode, error = collectives.broadcast_object(told)
    if error is not None:
        raise error
    if not collectives.is_rank_0():
        ray = connect(needed_for, address=address, authentication=mode)
        actors = {name: ray.get_actor(name, namespace=NAMESPACE) for name in names}
    return ray, actors


def start_seconds() -> float:
    """That actors may take until they are there: a run with a longer collective_timeout has slower disks."""
    return max(START_SECONDS, collectives.time_limit())


def wait_for(ray: Any, actor: Any) -> None:
    """Until an actor that has died answers again. Raises Ray's error where it does not in `start_seconds`, which ends
    it, or where it has ended for good, and ConnectionError once this process has left Ray."""
    errors, deadline = ray.exceptions, time.monotonic() + start_seconds()
    while True:
        if not ray.is_initialized():  # a call would start a cluster of its own
            raise ConnectionError("the connection to Ray is closed")
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=max(1.0, deadline - time.monotonic()))
            return
        except errors.RayError as error:  # it is being started again
            if isinstance(error, errors.ActorDiedError) and not error.preempted:
                raise
            if time.monotonic() > deadline:
                ray.kill(actor, no_restart=True)
                raise
            time.sleep(0.2)


@contextmanager
def built_again() -> Iterator[None]:
    """Around what an actor is built by. Where that raises in one that Ray has started again, its process ends, so that
    Ray tries once more, up to TRIES times in a row; what is raised ends the actor for good, and is told to who waits.
    """
    import ray
    from ray.experimental import internal_kv  # a new process knows nothing else

    context = ray.get_runtime_context()
    failures = f"{NAMESPACE}/failures/{context.get_actor_id()}"
    try:
        yield
    except Exception:
        if not context.was_current_actor_reconstructed:
            raise
        failed = int(internal_kv._internal_kv_get(failures) or 0) + 1
        if failed == TRIES:
            raise
        internal_kv._internal_kv_put(failures, str(failed))
        traceback.print_exc()
        time.sleep(RETRY_SECONDS)
        os._exit(1)
    else:
        if context.was_current_actor_reconstructed:
            internal_kv._internal_kv_del(failures)


def raised_there(error: Any) -> Exception:
    """What a method of an actor raised, with the traceback of its process as a note. error: Ray's RayTaskError."""
    error.cause.add_note(str(error))
    return error.cause
