"""Rollouts that run ahead of the trainer: a source of prompts that announces batches to the engine."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...config.placement import AsyncConfig
from ...experience.rollouts import PromptBatch
from ...observe.metrics import MetricsAccumulator
from ..hooks import StepData, StepHook
from ..vl.parts import PromptSource

T = torch.Tensor


class RolloutsAhead:
    """Hands out a source's batches in order; the engine works on those behind the one handed out.

    What is begun is never lost: `state_dict` is where the source stood before the first batch not handed out, with what
    the engine has made of it and of those behind it.

    Args:
        source: of the batches.
        settings: how many run ahead, and how old their tokens may be.
        engine: which works ahead.
        announce: lets it begin on a batch.
    """

    runs_ahead = True

    def __init__(
        self, source: PromptSource, settings: AsyncConfig, engine: Any, announce: Callable[[PromptBatch], None]
    ) -> None:
        self.source, self.settings, self.engine, self.announce = source, settings, engine, announce
        self.epoch = 0.0  # of the batches handed out
        self._begun: deque[tuple[dict[str, Any], PromptBatch, float]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def next(self, step: int, left: int = 1) -> PromptBatch:
        """The next batch, once others are begun behind it; see `PromptSource.next`."""
        while len(self._begun) <= min(self.settings.ahead, left - 1):
            state, batch = self.source.state_dict(), self.source.next(step)
            self.announce(batch)
            self._begun.append((state, batch, self.source.epoch))
        _, batch, self.epoch = self._begun.popleft()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        stood = self._begun[0][0] if self._begun else self.source.state_dict()
        return {**stood, "engine": self.engine.state_dict(), "max_staleness": self.settings.max_staleness}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s; what is begun is of what comes after it. What the engine made where older tokens
        were allowed is drawn again."""
        self._begun.clear()
        self.source.load_state_dict(state)
        too_old = state.get("max_staleness", 0) > self.settings.max_staleness
        self.engine.load_state_dict({} if too_old else state.get("engine", {}))


class StalenessHook(StepHook):
    """Makes responses with tokens of a policy more than `most` versions old invalid; reports the age of all tokens.

    The present policy's version is the number of finished steps. engine: whose `measured()` tells how long trainer and
    engines waited for each other.
    """

    before_on_prompts = "max_staleness"  # the engine begins, so that hooks are to leave prompts as they are

    def __init__(self, most: int, engine: Any) -> None:
        self.most, self.engine, self.dropped = most, engine, 0.0

    def on_scores(self, rollouts: Any) -> Any:
        """What is too old teaches nothing, and is in no statistics."""
        too_old = self.context.step() - rollouts.versions > self.most
        rollouts.leave_out(too_old)
        self.dropped = too_old.float().mean().item()
        return rollouts

    def on_experience(self, step: StepData) -> StepData:
        """`staleness_mean` and its relatives, see `_add_ages`."""
        for each in step.batches:
            if not hasattr(each, "token_versions"):  # drawn as a whole
                ages = self.context.step() - each.policy_version
                _add_ages(step.metrics, ages, torch.ones_like(ages, dtype=torch.bool), self.most)
            elif each.token_versions is not None:
                _add_ages(step.metrics, self.context.step() - each.token_versions, each.action_mask, self.most)
        return step

    def metrics(self) -> Mapping[str, float]:
        """The share that was dropped, and what the engine measured."""
        return {"dropped_stale_share": self.dropped} | dict(self.engine.measured())


def _add_ages(metrics: MetricsAccumulator, ages: T, mask: T, most: int) -> None:
    """`staleness_mean`, `staleness_max`, and `staleness_0` to `staleness_<most>`, the share of each age under the mask;
    the last one holds those that are older too. ages: versions between the policy that drew and the present one."""
    ages = ages.clamp(min=0)
    metrics.add_mean("staleness_mean", ages.float(), mask)
    if mask.any():
        metrics.add_max("staleness_max", float(ages[mask].max()))
    for age in range(most + 1):
        of_age = ages == age if age < most else ages >= age
        metrics.add_mean(f"staleness_{age}", of_age.float(), mask)


def build(parts: Any) -> StalenessHook | None:
    """For `max_staleness`."""
    most = parts.config.asynchronous.max_staleness
    return StalenessHook(most, parts.maker.engine) if most else None
