"""Scorers and reward models behind another transport: actors of a Ray cluster.

In this process a scorer is a `CallableSource`; behind HTTP it is served by `server.py` and asked by `remote.py`; here
it lives in Ray actors of a local cluster, or of the one that RAY_ADDRESS names. Ray is optional.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...config.given_files import whole, with_whole_paths
from ...config.placement import ResourcesConfig
from ...config.shared import RewardConfig
from ...errors import ConfigError, RewardError
from ...rewards.batch import Call, PendingSource, RewardBatch, Scores, Source
from ...rewards.local.forms import AUTO
from ...rewards.registry import check_scorer, of_run
from ...runtime import collectives
from ...runtime.usercode.calls import describe_error, masked
from ...runtime.usercode.loading import MODULE_PREFIX, load_reward_fn
from .actors import named_actors, on_every_rank, raised_there, start_seconds, wait_for
from .cluster import connect, end_of, on_devices, process_environment
from .reward_actor import RewardActor, build_model, build_source

logger = logging.getLogger(__name__)


class ActorPool(PendingSource):
    """Actors that each hold the same source; a batch is shared out between them. All ranks make one together, and share
    its actors.

    build(*arguments) makes the source in an actor. options: Ray's, of each actor. A part that is not scored within
    `timeout` seconds, for each rank that may ask at the same time, or whose actor dies, is failed; the actor starts
    again. What the source itself raises is a RewardError. device: None for that of the actor's process. here: the
    actors are on this host. model: the source has one. variables: of the actors' environment.
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
        here: bool = False,
        model: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._variables = variables or {}
        self.name, self.device, self._needed_for, self._here = name, device, needed_for, here
        if model and device == "cpu" != get_accelerator().device_name() and collectives.is_rank_0():
            logger.warning(
                "reward %s computes on the CPU in its Ray actors: distributed.resources.reward.devices gives them "
                "devices of this host, and reward.num_gpus those of a cluster",
                name,
            )
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
        usual: dict[str, Any] = {"num_cpus": 0, "runtime_env": process_environment()}  # Ray reserves no core for them
        if self._here:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            usual["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                self._ray.get_runtime_context().get_node_id(), soft=False
            )
        each, given = [usual | dict(own) for own in options], (arguments, torch.get_num_threads(), self._variables)
        actors = named_actors(self._ray, RewardActor, "reward", each, build, *given)
        try:  # starting, with its imports and checkpoints, does not count against a call
            self._ray.get([actor.__ray_ready__.remote() for actor in actors.values()], timeout=start_seconds())
        except self._ray.exceptions.RayError as error:
            raise ConfigError(f"reward {self.name} does not start on Ray: {end_of(error)}") from error
        return self._ray, actors

    def _wait_until_back(self, actor: Any) -> None:
        """Another rank's calls may be under way by now. Raises RewardError."""
        try:
            wait_for(self._ray, actor)
        except (ConnectionError, self._ray.exceptions.RayError) as error:
            raise RewardError(f"reward {self.name} does not start again on Ray: {end_of(error)}") from error

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
            self._wait_until_back(self._actors[place])
            return Scores.all_failed(len(part), f"{self.name} on Ray: no result within {self.timeout:g} s")
        except errors.RayTaskError as error:
            cause = raised_there(error)
            if isinstance(cause, RewardError):
                raise cause from None
            raise RewardError(f"reward {self.name} on Ray {masked(describe_error(cause))}") from cause
        except errors.RayError as error:  # it starts again by itself
            self._wait_until_back(self._actors[place])
            return Scores.all_failed(len(part), f"{self.name} on Ray: {type(error).__name__}")

    def close(self) -> None:
        """End the actors, by rank 0; the cluster stays."""
        self._threads.shutdown(wait=True)
        for actor in self._actors if collectives.is_rank_0() else ():
            self._ray.kill(actor, no_restart=True)


class RaySource(ActorPool):
    """A scorer in actors. key: a registered one or `path.py:name`. config: of the run. lenient: see CallableSource."""

    def __init__(
        self,
        name: str,
        key: str,
        settings: Mapping[str, Any] | None = None,
        *,
        config: RewardConfig | None = None,
        lenient: bool = False,
        **pool: Any,
    ) -> None:
        target: Callable[..., Any] | str = key
        if ".py:" in key:
            target = key = with_whole_paths(key)
            load_reward_fn(key)
        else:
            target, settings = check_scorer(key, settings or {})
            if given := of_run(target, config):  # its own requests have the run's deadline, of which it tells
                longest = max(config.reward_timeout, settings.get("timeout") or 0.0)
                settings, pool = given | settings, pool | {"timeout": 2 * longest}
        tokens = {(config or RewardConfig()).reward_token_env, *_tokens(settings or {})}
        variables = {name: os.environ[name] for name in tokens if name and name in os.environ}
        module = sys.modules.get(getattr(target, "__module__", ""))
        if module is not None and module.__name__.startswith(MODULE_PREFIX):  # a plugin's: its code goes along
            self._moved = module
        form = AUTO if config is None else config.reward_form
        model = inspect.isclass(target) and "offload" in inspect.signature(target).parameters
        arguments = name, target, dict(settings or {}), form, lenient
        super().__init__(name, build_source, arguments, model=model, variables=variables, **pool)


def _tokens(settings: Mapping[str, Any]) -> set[str]:
    """The variables that hold a scorer's tokens, and those of scorers that are part of it."""
    own = {settings["token_env"]} if isinstance(settings.get("token_env"), str) else set()
    return own.union(*(_tokens(each) for each in settings.values() if isinstance(each, Mapping)))


class RayRewardModel(ActorPool):
    """A reward model of `reward_pretrain` in actors; path: a folder that they can read."""

    def __init__(self, name: str, path: str, **pool: Any) -> None:
        super().__init__(name, build_model, (name, whole(path)), model=True, **pool)


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
    return pool | {"options": [{"runtime_env": on_devices(device)} for device in devices[:count]], "here": True}
