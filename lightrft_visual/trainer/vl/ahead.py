"""Rollouts that run ahead of the trainer: batches announced to the engine, and how old their tokens are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...batches.experience import Experience
from ...batches.prompts import PromptBatch
from ...batches.rollouts import Rollout
from ...observe.metrics import MetricsAccumulator
from ..staleness import add_ages


class RolloutsAhead:
    """Hands out batches of prompts in order; the engine works on up to `most` batches behind the one handed out.

    take: the next batch of the sampler; state: where the sampler stands; announce: lets the engine begin on a batch.
    What is begun is never lost: `state_now` is where the sampler stood before the first batch not handed out, so a
    resumed run begins with that one again.
    """

    def __init__(
        self,
        most: int,
        take: Callable[[], PromptBatch],
        state: Callable[[], dict[str, Any]],
        announce: Callable[[PromptBatch], None],
    ) -> None:
        self.most, self.take, self.state, self.announce = most, take, state, announce
        self._begun: deque[tuple[dict[str, Any], PromptBatch]] = deque()

    def next(self, left: int) -> PromptBatch:
        """The next batch, once others are begun behind it. left: steps of the run, this one included. A collective."""
        while len(self._begun) <= min(self.most, left - 1):
            state, batch = self.state(), self.take()
            self.announce(batch)
            self._begun.append((state, batch))
        return self._begun.popleft()[1]

    def state_now(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._begun[0][0] if self._begun else self.state()


def leave_out_stale(rollouts: Sequence[Rollout], version: int, most: int) -> dict[str, float]:
    """Responses with a token of a policy more than `most` versions before `version` are made invalid; their share."""
    stale = [rollout for rollout in rollouts if version - rollout.policy_version > most]
    for rollout in stale:
        rollout.valid = False
    return {"dropped_stale_share": len(stale) / len(rollouts)}


def add_staleness(metrics: MetricsAccumulator, experiences: Sequence[Experience], version: int, most: int) -> None:
    """The ages of all tokens; see `add_ages`."""
    for each in experiences:
        if each.token_versions is not None:
            add_ages(metrics, version - each.token_versions, each.action_mask, most)
