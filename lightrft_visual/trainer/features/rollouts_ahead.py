"""Rollouts that run ahead of the trainer: a source of prompts that announces batches to the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...experience.prompts import PromptBatch
from ..vl.prompts import PromptSource


class RolloutsAhead:
    """Hands out a source's batches in order; the engine works on up to `most` batches behind the one handed out.

    engine: its `note_policy` learns of new weights; announce: lets it begin on a batch. What is begun is never lost:
    `state_dict` is where the source stood before the first batch not handed out, so a resumed run begins with that one
    again.
    """

    runs_ahead = True

    def __init__(self, source: PromptSource, most: int, engine: Any, announce: Callable[[PromptBatch], None]) -> None:
        self.source, self.most, self.engine, self.announce = source, most, engine, announce
        self._begun: deque[tuple[dict[str, Any], PromptBatch]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def next(self, step: int, left: int = 1) -> PromptBatch:
        """The next batch, once others are begun behind it; see `PromptSource.next`."""
        while len(self._begun) <= min(self.most, left - 1):
            state, batch = self.source.state_dict(), self.source.next(step)
            self.announce(batch)
            self._begun.append((state, batch))
        return self._begun.popleft()[1]

    def policy_is_new(self, version: int) -> None:
        """Tokens from here on are of this version."""
        self.engine.note_policy(version)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._begun[0][0] if self._begun else self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.source.load_state_dict(state)
