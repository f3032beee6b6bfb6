"""Remote scores that are asked for while other samples are still generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from ..experience.rollouts import Rollout
from .batch import Call, JoinedScores, RewardBatch, Scores, StreamingSource, batch_from_rollouts


class EarlyScores:
    """One call's streaming sources at work. Requests hold the same samples as they would after generation; each leaves
    as soon as its own are finished.

    needed: for each source the samples that it scores, ascending.
    """

    def __init__(self, needed: Mapping[StreamingSource, Sequence[int]], call: Call) -> None:
        self.call = call
        self._rollouts: dict[int, Rollout] = {}
        self._parts: list[tuple[list[int], Future[RewardBatch]]] = []
        self._asked: dict[int, list[Future[Scores]]] = {}  # by id of the source
        for source, indices in needed.items():
            cut = [list(indices[start : start + call.chunk]) for start in range(0, len(indices), call.chunk)]
            parts = [(part, Future()) for part in cut]
            self._parts += parts
            self._asked[id(source)] = source.submit_parts([future for _, future in parts], call)

    @property
    def scores(self) -> dict[int, JoinedScores]:
        """Those of all samples that each source scores, by id of the source."""
        return {source: JoinedScores(asked) for source, asked in self._asked.items()}

    def add(self, first: int, rollouts: Sequence[Rollout]) -> None:
        """Finished samples number `first` and following of the call."""
        self._rollouts |= {first + number: rollout for number, rollout in enumerate(rollouts)}
        for indices, future in self._parts:
            if not future.done() and all(index in self._rollouts for index in indices):
                future.set_result(batch_from_rollouts([self._rollouts[index] for index in indices]))

    def cancel(self) -> None:
        """The samples that are missing will not come."""
        for _, future in self._parts:
            future.cancel()
