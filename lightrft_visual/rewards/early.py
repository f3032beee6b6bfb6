"""Remote scores that are asked for while other samples are still generated."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait

from ..batches.rollouts import Rollout
from .batch import Call, JoinedScores, RewardBatch, Scores, StreamingSource, batch_from_rollouts


class EarlyScores:
    """One call's streaming sources at work. Requests hold the same samples as they would after generation; each leaves
    as soon as its own are finished.

    places: for each source the samples that it scores, ascending.
    """

    def __init__(self, places: Mapping[StreamingSource, Sequence[int]], call: Call) -> None:
        self.call = call
        self._rollouts: dict[int, Rollout] = {}
        self._parts: list[tuple[list[int], Future[RewardBatch]]] = []
        self._asked: dict[int, list[tuple[list[int], Future[Scores]]]] = {}  # by id of the source
        for source, indices in places.items():
            cut = [list(indices[start : start + call.chunk]) for start in range(0, len(indices), call.chunk)]
            parts = [(part, Future()) for part in cut]
            self._parts += parts
            futures = source.submit_parts([future for _, future in parts], call)
            self._asked[id(source)] = list(zip(cut, futures, strict=True))

    @property
    def scores(self) -> dict[int, JoinedScores]:
        """Those of all samples that each source scores, by id of the source."""
        return {source: JoinedScores([future for _, future in asked]) for source, asked in self._asked.items()}

    def answered(self, first: int, last: int, seconds: float = 0.0) -> bool:
        """Whether all scores of the samples from number `first` to before `last` are there, after waiting so long at
        most."""
        asked = [future for asked in self._asked.values() for future, _ in _over(asked, first, last)]
        return not wait(asked, seconds).not_done

    def of(self, first: int, last: int) -> dict[int, Future[Scores]]:
        """The scores of the samples from number `first` to before `last`, by id of the source; waits for them. Raises
        what stands in the way of a score."""
        found: dict[int, Future[Scores]] = {}
        for source, asked in self._asked.items():
            parts = [future.result().select(rows) for future, rows in _over(asked, first, last)]
            found[source] = Future()
            found[source].set_result(Scores.join(parts))
        return found

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


def _over(asked: Sequence[tuple[list[int], Future[Scores]]], first: int, last: int) -> list[tuple[Future, range]]:
    """The requests with samples from `first` to before `last`, and the places of these in each."""
    cuts = [
        (future, range(bisect.bisect_left(indices, first), bisect.bisect_left(indices, last)))
        for indices, future in asked
    ]
    return [(future, rows) for future, rows in cuts if rows]
