"""The same scorer behind another transport: actors of a Ray cluster.

In this process a scorer is a `CallableSource`; behind HTTP it is served by `server.py` and asked by `remote.py`; here
it lives in Ray actors of a local cluster, or of the one that RAY_ADDRESS names. Ray is optional.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...errors import ConfigError, RewardError
from ...strategy.ray_cluster import connect, process_environment
from ...usercode.calls import describe_error, masked
from ...usercode.loading import MODULE_PREFIX, load_reward_fn
from ..batch import Call, PendingSource, RewardBatch, Scores, Source
from ..local.callables import CallableSource
from ..local.forms import AUTO
from ..registry import check_scorer, find_scorer, instantiate

START_SECONDS = 180.0


def build_source(
    name: str, target: Callable[..., Any] | str, settings: Mapping[str, Any], form: str, lenient: bool = False
) -> Source:
    """A scorer from its class or function, or from `path.py:name`, called as `form` says. lenient: see there."""
    if isinstance(target, str):
        return CallableSource(load_reward_fn(target), name, settings, form, lenient=lenient)
    scorer = instantiate(target, settings)
    return scorer if isinstance(scorer, Source) else CallableSource(scorer, name, lenient=lenient)


class _Actor:
    """Runs in a Ray worker."""

    def __init__(self, *arguments: Any) -> None:
        self._source = build_source(*arguments)

    def ready(self) -> bool:
        return True

    def score(self, batch: RewardBatch, device: str) -> Scores:
        return self._source.score(batch, Call(device=device))


class RaySource(PendingSource):
    """A pool of actors that each hold the scorer; a batch is shared out between them.

    key: a registered scorer or `path.py:name`. A part that is not scored within `timeout` seconds, or whose actor dies,
    is failed, and the actor replaced; what the scorer itself raises is a RewardError, but for a lenient one (see
    CallableSource). actor_options: for Ray, such as {"num_gpus": 1, "num_cpus": 0}.
    """

    def __init__(
        self,
        name: str,
        key: str,
        settings: Mapping[str, Any] | None = None,
        *,
        actors: int = 1,
        timeout: float = 60.0,
        device: str = "cpu",
        form: str = AUTO,
        lenient: bool = False,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.timeout, self.device = name, timeout, device
        target: Callable[..., Any] | str = key
        if ".py:" in key:
            load_reward_fn(key)
        else:
            check_scorer(key, settings or {})
            target = find_scorer(key)
        self._ray = connect("reward_transport ray")
        module = sys.modules.get(getattr(target, "__module__", ""))
        if module is not None and module.__name__.startswith(MODULE_PREFIX):  # a plugin's: its code goes along
            self._ray.cloudpickle.register_pickle_by_value(module)
        options = {"num_cpus": 0, "runtime_env": process_environment()}
        factory = self._ray.remote(_Actor).options(**options, **(actor_options or {}))
        self._start = lambda: factory.remote(name, target, dict(settings or {}), form, lenient)
        self._actors = [self._start() for _ in range(actors)]
        self._wait_until_ready(self._actors)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"ray-{name}")

    def _wait_until_ready(self, actors: list[Any]) -> None:
        """Starting, with its imports and checkpoints, does not count against a call. Raises ConfigError."""
        try:
            self._ray.get([actor.ready.remote() for actor in actors], timeout=START_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise ConfigError(f"reward {self.name} does not start on Ray: {type(error).__name__}: {error}") from None

    def submit(self, batch: RewardBatch, call: Call) -> Future[Scores]:
        """Start scoring in the actors."""
        return self._threads.submit(self._score, batch)

    def _score(self, batch: RewardBatch) -> Scores:
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
            self._replace(place)
            return Scores.all_failed(len(part), f"{self.name} on Ray: no result within {self.timeout:g} s")
        except errors.RayTaskError as error:
            if isinstance(error.cause, RewardError):
                raise error.cause from None
            raise RewardError(f"reward {self.name} on Ray {masked(describe_error(error.cause))}") from None
        except errors.RayError as error:
            self._replace(place)
            return Scores.all_failed(len(part), f"{self.name} on Ray: {type(error).__name__}")

    def _replace(self, place: int) -> None:
        self._ray.kill(self._actors[place], no_restart=True)
        self._actors[place] = self._start()
        self._wait_until_ready([self._actors[place]])

    def close(self) -> None:
        """End the actors; the cluster stays."""
        self._threads.shutdown(wait=True)
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
