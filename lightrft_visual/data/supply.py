"""Decoded rows for rollouts. A row that turns out bad only now gives its place to the next one of the order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from ..errors import DataError
from ..runtime import collectives
from .bad_rows import BadRow
from .prompts import PromptDataset, PromptRow
from .sampler import PromptSampler

_THREADS = 8


class PromptSupply:
    """Global batches of decoded rows, full on every rank.

    What no header tells (a truncated file, a remote image that is gone or makes the prompt too long) is found here. By
    the policy of the row it ends the run, or the row is counted in `dataset.bad` and replaced by the next index of the
    sampler. All ranks replace the same rows in the same order, so their batches keep their size, and a resumed run
    continues with the same rows.
    """

    def __init__(self, dataset: PromptDataset, sampler: PromptSampler) -> None:
        self.dataset, self.sampler = dataset, sampler
        self._known: dict[int, BadRow] = {}  # by index
        self._pool = ThreadPoolExecutor(_THREADS, "rows")
        self._ahead: dict[int, Future[PromptRow | BadRow]] = {}  # by index

    def look_ahead(self) -> list[Future[PromptRow | BadRow]]:
        """Begin to load this rank's rows of the next global batch, beside whatever follows; no collective.

        What comes out of `next_rows` is the same with and without it: the results of these futures in this order, as
        long as no row of any rank turns out bad.
        """
        upcoming = self.sampler.upcoming()
        order = list(islice(upcoming, self.sampler.batch_size))
        self._replace_known(order, upcoming)
        mine = order[collectives.rank() :: collectives.world_size()]
        self._ahead = {index: self._ahead.get(index) or self._pool.submit(self._load, index) for index in mine}
        return [self._ahead[index] for index in mine]

    def next_rows(self, step: int) -> list[PromptRow]:
        """This rank's rows r, r + W, ... of the next global batch. A collective. step: for the list of bad rows.

        Raises DataError for a bad row that may not be skipped, for a larger share of them than max_bad_share, and when
        no row is left.
        """
        order, rank, world = self.sampler.next_batch(), collectives.rank(), collectives.world_size()
        PromptSampler.shard(order, rank, world)  # refuses a batch that does not divide
        mine = range(rank, len(order), world)
        loaded: dict[int, PromptRow | BadRow] = {}  # by place in the batch
        while True:
            self._replace_known(order, self.sampler.rows())
            missing = [place for place in mine if not isinstance(loaded.get(place), PromptRow)]
            rows = {index: self._begun(index) for index in {order[place] for place in missing}}
            loaded |= {place: rows[order[place]].result() for place in missing}
            if not self._bad_anywhere([(order[place], loaded[place]) for place in missing], step):
                return [loaded[place] for place in mine]

    def first_rows(self, count: int, step: int) -> list[PromptRow]:
        """The first `count` usable rows of the data set, or all of them, alike on all ranks; the order stays as it is.

        A collective; raises what `next_rows` does.
        """
        rows: list[PromptRow] = []
        for index in range(len(self.dataset)):
            if len(rows) == count:
                break
            row = self._load(index)
            if not self._bad_anywhere([(index, row)], step):
                rows.append(row)
        return rows

    def _begun(self, index: int) -> Future[PromptRow | BadRow]:
        return self._ahead.pop(index, None) or self._pool.submit(self._load, index)

    def _load(self, index: int) -> PromptRow | BadRow:
        try:
            return self.dataset.load(index)
        except DataError as error:
            return BadRow.of(error, self.dataset.name(index))

    def _bad_anywhere(self, results: list[tuple[int, PromptRow | BadRow]], step: int) -> bool:
        """Whether any rank met a bad row, which every rank then knows and counts. Raises DataError by the policy."""
        mine = [(index, row) for index, row in results if isinstance(row, BadRow)]
        bad = dict(pair for pairs in collectives.all_gather_object(mine) for pair in pairs)
        for row in bad.values():
            if self.dataset.policy(row) == "error":
                raise row.as_error()
            self.dataset.bad.add(replace(row, found=f"step {step}"))
        self._known |= bad
        self.dataset.bad.check()
        if len(self._known) == len(self.dataset):
            raise DataError(f"no usable row is left: {self.dataset.bad.summary()}")
        return bool(bad)

    def _replace_known(self, order: list[int], following: Iterator[int]) -> None:
        """Put the indices that follow in the place of bad rows."""
        for place, index in enumerate(order):
            while index in self._known:
                index = next(following)
            order[place] = index
