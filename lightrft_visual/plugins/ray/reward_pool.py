"""Scorers and reward models behind another transport: actors of a Ray cluster.

In this process a scorer is a `CallableSource`; behind HTTP it is served by `server.py` and asked by `remote.py`; here
it lives in Ray actors of a local cluster, or of the one that RAY_ADDRESS names. Ray is optional.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...config.placement import ResourcesConfig
from ...errors import ConfigError, RewardError
from ...rewards.batch import Call, PendingSource, RewardBatch, Scores, Source
from ...rewards.local.forms import AUTO
from ...rewards.registry import check_scorer
from ...runtime import collectives
from ...runtime.usercode.calls import describe_error, masked
from ...runtime.usercode.loading import MODULE_PREFIX, load_reward_fn
from .actors import START_SECONDS, named_actors, on_every_rank
from .cluster import connect, on_devices, process_environment
from .reward_actor import RewardActor, build_model, build_source


class ActorPool(PendingSource):
    """Actors that each hold the same source; a batch is shared out between them. All ranks make one together, and share
    its actors.

    build(*arguments) makes the source in an actor. options: Ray's, of each actor. A part that is not scored within
    `timeout` seconds, for each rank that may ask at the same time, or whose actor dies, is failed; the actor starts
    again. What the source itself raises is a RewardError. device: None for that of the actor's process.
    """

    _moved: Any = None  # a module whose code goes along, as the actors cannot import it

    def __init__(
        self,
        name: str,
        build: Callable[..., Source],
        arguments: tuple,
        *,
        options: Sequence[Mapping[str, Any]] = ({},),
        timeout: float = 60.0,
        device: str | None = "cpu",
        needed_for: str = "reward_transport ray",
        cpus: float | None = None,
    ) -> None:
        self.name, self.device, self._needed_for = name, device, needed_for
        self.timeout = timeout * collectives.world_size()
        self._ray, actors = on_every_rank(lambda: self._begin(build, arguments, options, cpus), needed_for)
        self._actors = list(actors.values())
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"ray-{name}")

    def _begin(
        self, build: Callable[..., Source], arguments: tuple, options: Sequence[Mapping[str, Any]], cpus: float | None
    ) -> tuple[Any, dict[str, Any]]:
        """See `on_every_rank`."""
        self._ray = connect(self._needed_for, cpus=cpus)
        if self._moved is not None:
            self._ray.cloudpickle.register_pickle_by_value(self._moved)
        usual = {"num_cpus": 0, "runtime_env": process_environment()}  # Ray reserves no core for them
        each = [usual | dict(own) for own in options]
        actors = named_actors(self._ray, RewardActor, "reward", each, build, arguments, torch.get_num_threads())
        self._wait_until_ready(list(actors.values()))
        return self._ray, actors

    def _wait_until_ready(self, actors: list[Any], again: bool = False) -> None:
        """Starting, with its imports and checkpoints, does not count against a call. again: they died, and Ray starts
        them anew. Raises ConfigError."""
        errors, deadline = self._ray.exceptions, time.monotonic() + START_SECONDS
        for actor in actors:
            while True:
                try:
                    self._ray.get(actor.process.remote(), timeout=max(1.0, deadline - time.monotonic()))
                    break
                except errors.RayError as error:
                    coming = isinstance(error, errors.RayActorError) and again
                    if not coming or time.monotonic() > deadline:
                        what = f"{type(error).__name__}: {error}"
                        raise ConfigError(f"reward {self.name} does not start on Ray: {what}") from None
                    time.sleep(0.2)

    def submit(self, batch: RewardBatch, call: Call) -> Future[Scores]:
        """Start scoring in the actors."""
        return self._threads.submit(self._score, batch)

    def _score(self, batch: RewardBatch) -> Scores:
        batch = replace(batch, vision=[])  # large, and of modules that are given directly
        share = -(-len(batch) // len(self._actors))
        parts = batch.chunks(share)
        tasks = [actor.score.remote(part, self.device) for actor, part in zip(self._actors, parts)]
        self._ray.wait(tasks, num_returns=len(tasks), timeout=self.timeout)
        return Scores.join([self._collect(place, task, part) for place, (task, part) in enumerate(zip(tasks, parts))])

    def _collect(self, place: int, task: Any, part: RewardBatch) -> Scores:
        errors = self._ray.exceptions
        try:
            return self._ray.get(task, timeout=0)
        except errors.GetTimeoutError:
            self._ray.kill(self._actors[place], no_restart=False)
            self._wait_until_ready([self._actors[place]], again=True)
            return Scores.all_failed(len(part), f"{self.name} on Ray: no result within {self.timeout:g} s")
        except errors.RayTaskError as error:
            if isinstance(error.cause, RewardError):
                raise error.cause from None
            raise RewardError(f"reward {self.name} on Ray {masked(describe_error(error.cause))}") from None
        except errors.RayError as error:  # it starts again by itself; another rank's calls may be under way by now
            self._wait_until_ready([self._actors[place]], again=True)
            return Scores.all_failed(len(part), f"{self.name} on Ray: {type(error).__name__}")

    def close(self) -> None:
        """End the actors, by rank 0; the cluster stays."""
        self._threads.shutdown(wait=True)
        for actor in self._actors if collectives.is_rank_0() else ():
            self._ray.kill(actor, no_restart=True)


class RaySource(ActorPool):
    """A scorer in actors. key: a registered one or `path.py:name`. lenient: see CallableSource."""

    def __init__(
        self,
        name: str,
        key: str,
        settings: Mapping[str, Any] | None = None,
        *,
        form: str = AUTO,
        lenient: bool = False,
        **pool: Any,
    ) -> None:
        target: Callable[..., Any] | str = key
        if ".py:" in key:
            load_reward_fn(key)
        else:
            target, settings = check_scorer(key, settings or {})
        module = sys.modules.get(getattr(target, "__module__", ""))
        if module is not None and module.__name__.startswith(MODULE_PREFIX):  # a plugin's: its code goes along
            self._moved = module
        super().__init__(name, build_source, (name, target, dict(settings or {}), form, lenient), **pool)


class RayRewardModel(ActorPool):
    """A reward model of `reward_pretrain` in actors; path: a folder that they can read."""

    def __init__(self, name: str, path: str, **pool: Any) -> None:
        super().__init__(name, build_model, (name, path), **pool)


def actor_pool(resources: ResourcesConfig) -> dict[str, Any]:
    """Keyword arguments of an ActorPool for what the run's resources say of rewards: one actor where they say nothing.
    Raises ConfigError for more actors than devices."""
    devices, gpus = resources.reward_devices, resources.reward_num_gpus
    count = resources.reward_num_workers or (len(devices) if devices else 1)
    rollouts = resources.rollout_num_cpus * (resources.rollout_num_workers or 1)
    pool = {"cpus": max(os.cpu_count() or 1, rollouts)}
    if get_accelerator().device_name() == "cpu" or not (devices or gpus):
        return pool | {"options": [{}] * count}
    pool["device"] = None
    if gpus is not None:
        if gpus > count and gpus % count:
            raise ConfigError(
                f"reward_num_gpus {gpus:g} are {gpus / count:g} for each of {count} actors (reward_num_workers): Ray "
                "gives parts of one GPU, or whole ones"
            )
        return pool | {"options": [{"num_gpus": gpus / count}] * count}
    if count > len(devices):
        raise ConfigError(f"reward_num_workers is {count}, but rewards have {len(devices)} device(s)")
    return pool | {"options": [{"runtime_env": on_devices(device)} for device in devices[:count]]}
