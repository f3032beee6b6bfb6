"""Engines with weights and a KV cache of their own on the trainer's device, which they give back while it trains."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator

from ..errors import ConfigError, RolloutError, did_you_mean
from .engine import RolloutEngine


class ResidentEngine(RolloutEngine):
    """How such an engine sleeps and wakes; a subclass says how memory is let go and taken back.

    enable_sleep: whether it does. failure: of an earlier call, whose requests may still be under way.
    """

    file_names = True
    streams = True
    enable_sleep: bool
    asleep = lacks_cache = False
    failure: str | None = None

    def sleep(self, keep_weights: bool = True) -> None:
        """Free accelerator memory until `wake`: the KV cache and, unless they are kept, the weights. Nothing to free
        on CPU.

        Without weights `wake` brings back their room alone until `update_weights` has filled it; then it takes the KV
        cache back, which does not stand beside what the sync gathers. One that sleeps with its weights may be told
        later that they are not needed.
        """
        lets_go = not (self.asleep and (keep_weights or self.lacks_weights))
        if self.enable_sleep and get_accelerator().device_name() != "cpu" and lets_go:
            self._let_go(keep_weights)
            self.asleep, self.lacks_weights = True, self.lacks_weights or not keep_weights

    def wake(self) -> None:
        """Take back what sleeps: without weights their room alone, and after new ones the KV cache."""
        later = self.lacks_cache and not self.lacks_weights
        if not (self.asleep or later):
            return
        get_accelerator().empty_cache()  # engines take memory beside PyTorch's, which keeps what it has freed
        if self.asleep:
            self._take_back("weights" if self.lacks_weights else None)
            self.asleep, self.lacks_cache = False, self.lacks_weights
        else:
            self._take_back("kv_cache")
            self.lacks_cache = False

    def _let_go(self, keep_weights: bool) -> None:
        """Also of an engine that sleeps with its weights, which it need not keep any more."""
        raise NotImplementedError

    def _take_back(self, what: str | None) -> None:
        """what: weights or kv_cache; None: all that was let go."""
        raise NotImplementedError

    def make_ready(self) -> None:
        """Awake, for requests. Raises RolloutError for an engine that cannot be used."""
        if self.failure is not None:
            raise RolloutError(f"the engine failed before: {self.failure}")
        if self.lacks_weights:
            raise RolloutError("the engine slept without its weights: call update_weights before it generates")
        self.wake()


def check_engine_kwargs(
    lacks: str, given: Mapping[str, Any], known: Iterable[str], own: Container[str], decided_by: Mapping[str, str]
) -> None:
    """Raise ConfigError for an argument of engine_kwargs that the engine does not know, or that the run sets itself.

    Args:
        lacks: how the first is said, such as 'vLLM has no engine argument'.
        given: the arguments.
        known: names that the engine takes.
        own: names that the run sets.
        decided_by: settings that decide some of these.
    """
    known = [*known]
    for name in given:
        if name not in known:
            raise ConfigError(f"engine_kwargs: {lacks} {name!r}{did_you_mean(name, known)}")
        if name in own:
            by = f"use {decided_by[name]}" if name in decided_by else "leave it out"
            raise ConfigError(f"engine_kwargs: {name} is set by the run itself; {by}")
