"""The order in which prompts are trained on: seeded, shuffled, resumable, the same for any number of ranks.

`PromptSampler` gives the order as indices, `PromptSupply` the decoded rows; one that turns out bad only now gives its
place to the next one of the order.
"""

import itertools
import math
from array import array
from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..config.vl import mixing_shares
from ..errors import ConfigError, DataError
from ..runtime import collectives
from ..runtime.seeding import derive_seed
from .bad_rows import LONG_PROMPT, BadRow
from .prompts import PromptDataset, PromptRow


class PromptSampler:
    """Global batches of data set indices, without end.

    Every epoch is one permutation of the rows; the epochs follow each other in one stream that is cut into batches.
    So no row is ever dropped and every batch is full: a batch that reaches the end of an epoch takes the rest from the
    next one (and a data set smaller than a batch repeats inside it). Rank r of W takes rows r, r + W, ... of a batch.

    With probabilities an epoch holds a fixed share of each data set, as long as no data set must repeat in it; of a
    larger data set each epoch takes the next part of its own permutation, so that all rows come up before one repeats.

    mixing: 'shuffled', rows of all data sets in any order; 'even', each batch has its share of every data set; 'turns',
    each batch is of one data set. The last two depend on the batch size.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        *,
        seed: int,
        probabilities: Sequence[float] | None = None,
        mixing: str = "shuffled",
    ) -> None:
        """sizes: rows of each data set, one at least, whose indices follow each other. Raises ConfigError."""
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be positive")
        self.sizes, self.batch_size, self.seed = list(sizes), batch_size, seed
        self.quotas, self.mixing = epoch_quotas(self.sizes, probabilities), mixing
        self.epoch_length = sum(self.quotas)  # rows in one epoch
        self.pattern = [] if mixing == "shuffled" else interleaved(self.quotas)
        self._places = [array("q") for _ in self.sizes]  # of each data set in the pattern
        for place, part in enumerate(self.pattern):
            self._places[part].append(place)
        self.consumed = 0  # rows of the stream handed out so far
        self._order_length = self.epoch_length if mixing == "shuffled" else batch_size
        self._orders: dict[int, list[int]] = {}  # of epochs, or of batches where they are mixed otherwise
        self._cycles: dict[int, tuple[int, list[int]]] = {}  # of each data set the permutation that was used last

    @property
    def epoch(self) -> float:
        """Epochs done so far, with fraction."""
        return self.consumed / self.epoch_length

    def num_batches(self, epochs: int) -> int:
        """Batches that cover `epochs` passes, the last one filled from the pass after."""
        return -(-self.epoch_length * epochs // self.batch_size)

    def next_batch(self) -> list[int]:
        """The next batch_size indices, for all ranks together."""
        return self.take(self.batch_size)

    def upcoming(self) -> Iterator[int]:
        """What `take` will give, one by one; the sampler does not move."""
        return (self._at(place) for place in itertools.count(self.consumed))

    def take(self, count: int) -> list[int]:
        """The next `count` indices of the stream."""
        batch = [self._at(place) for place in range(self.consumed, self.consumed + count)]
        self.consumed += count
        begun = self.consumed // self._order_length
        self._orders = {number: order for number, order in self._orders.items() if number >= begun}
        return batch

    def behind(self, index: int) -> Iterator[int]:
        """The other rows of its data set, from the next one on and around its end; then the rows of all."""
        ends = [*itertools.accumulate(self.sizes, initial=0)]
        part = bisect(ends, index)
        yield from itertools.chain(range(index + 1, ends[part]), range(ends[part - 1], index), range(ends[-1]))

    @staticmethod
    def shard(batch: Sequence[int], rank: int, world_size: int) -> list[int]:
        """A rank's rows of a global batch. Raises ConfigError if the ranks would get different numbers.

        Args:
            batch: indices, as `next_batch` gives them.
            rank: whose rows are wanted.
            world_size: number of ranks.
        """
        if len(batch) % world_size:
            raise ConfigError(f"a global batch of {len(batch)} prompts does not divide over {world_size} ranks")
        return list(batch[rank::world_size])

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and what the stream follows from."""
        state = {"consumed": self.consumed, "seed": self.seed, "sizes": self.sizes, "quotas": self.quotas}
        return state if self.mixing == "shuffled" else state | {"mixing": self.mixing, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` stopped; where rows are shuffled the batch size may differ. Raises DataError if the
        order would not match."""
        own = self.state_dict()
        known = {*own, *state} - {"consumed", "shuffle"}  # the latter was always true
        for name in sorted(known, reverse=True):  # sizes before quotas, which follow from them
            if state.get(name) != own.get(name):
                told = f"{name} was {state.get(name)}, now it is {own.get(name)}".replace("sizes", "rows of the data")
                raise DataError(f"cannot resume the prompt order: {told}; a new run takes the exported one: --pretrain")
        self.consumed = state["consumed"]
        self._orders = {}

    def _at(self, place: int) -> int:
        number, offset = divmod(place, self._order_length)
        if number not in self._orders:
            make = {"shuffled": self._epoch_order, "even": self._even_batch, "turns": self._batch_of_one}[self.mixing]
            self._orders[number] = make(number)
        return self._orders[number][offset]

    def _even_batch(self, number: int) -> list[int]:
        """Rows of all data sets by the pattern, shuffled, so that ranks have like shares."""
        rows: list[int] = []
        for part in range(len(self.sizes)):
            begin, end = (self._turns(part, (number + ahead) * self.batch_size) for ahead in (0, 1))
            rows += self._rows(part, begin, end - begin)
        return [rows[place] for place in self._permutation(len(rows), "mix", number)]

    def _batch_of_one(self, number: int) -> list[int]:
        part = self.pattern[number % len(self.pattern)]
        return self._rows(part, self._turns(part, number) * self.batch_size, self.batch_size)

    def _turns(self, part: int, places: int) -> int:
        """How often a data set has its turn in the first `places` of the pattern without end."""
        cycles, rest = divmod(places, len(self.pattern))
        return cycles * len(self._places[part]) + bisect_left(self._places[part], rest)

    def _rows(self, part: int, begin: int, count: int) -> list[int]:
        """Indices of `count` rows of one data set, from place `begin` of its own endless stream of permutations on."""
        start, size = sum(self.sizes[:part]), self.sizes[part]
        rows: list[int] = []
        while len(rows) < count:
            cycle, offset = divmod(begin + len(rows), size)
            if self._cycles.get(part, (None,))[0] != cycle:
                self._cycles[part] = cycle, self._permutation(size, f"part {part}", cycle)
            rows += self._cycles[part][1][offset : offset + count - len(rows)]
        return [start + row for row in rows]

    def _epoch_order(self, epoch: int) -> list[int]:
        rows: list[int] = []
        for part, quota in enumerate(self.quotas):
            rows += self._rows(part, epoch * quota, quota)
        return [rows[place] for place in self._permutation(len(rows), "mix", epoch)]

    def _permutation(self, size: int, purpose: str, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "prompt order", purpose, number))
        return torch.randperm(size, generator=generator).tolist()


def fitting_batch(wanted: int, prompts: int, step: int) -> int:
    """Prompts of a batch, no more than one pass over the data holds.

    Args:
        wanted: prompts as configured, a multiple of `step`.
        prompts: of one pass.
        step: the result is a multiple of it, and no less.
    """
    return min(wanted, max(step, prompts - prompts % step))


def epoch_quotas(sizes: Sequence[int], probabilities: Sequence[float] | None) -> list[int]:
    """Rows that each data set gives to one epoch: all without probabilities, else the largest epoch without repeats.

    Shares are met to within one row and each data set gives at least one. Raises ConfigError for probabilities that are
    not one positive number per data set.
    """
    if probabilities is None:
        return list(sizes)
    if len(probabilities) != len(sizes):
        raise ConfigError(f"{len(probabilities)} mixing probabilities for {len(sizes)} data sets (prompt_data_probs)")
    shares = mixing_shares(probabilities)
    length = min(size / share for size, share in zip(sizes, shares))
    return [max(1, round(share * length)) for share in shares]


def interleaved(quotas: Sequence[int]) -> list[int]:
    """Numbers of data sets whose shares are `quotas`, in the shortest order that spreads each of them evenly."""
    counts = [quota // math.gcd(*quotas) for quota in quotas]
    turns = [((turn + 0.5) / count, part) for part, count in enumerate(counts) for turn in range(count)]
    return [part for _, part in sorted(turns)]


_THREADS = 8


class PromptSupply:
    """Global batches of decoded rows, full on every rank.

    What no header tells (a truncated file, a remote image that is gone or makes the prompt too long) is found here. By
    the policy of the row it ends the run, or the row is counted in `dataset.bad` and replaced by the next index of the
    sampler, or where data sets are mixed by batch by the next row of its own. All ranks replace the same rows in the
    same order, so their batches keep their size, and a resumed run continues with the same rows.
    """

    def __init__(self, dataset: PromptDataset, sampler: PromptSampler) -> None:
        self.dataset, self.sampler = dataset, sampler
        self._known: dict[int, BadRow] = {}  # by index
        self._pool = ThreadPoolExecutor(_THREADS, "rows")
        self._ahead: dict[int, Future[PromptRow | BadRow]] = {}  # by index

    def go_on(self, met: Sequence[dict[str, Any]], same_limit: bool = True) -> None:
        """Take up the bad rows that an earlier process met: they are replaced before they are loaded, as they were. One
        that the settings may have made good since, or that ends the run now, is met again. same_limit: of tokens."""
        rows = [BadRow(**each) for each in met]
        rows = [row for row in rows if self.dataset.policy(row) == "skip" and (same_limit or row.cause != LONG_PROMPT)]
        self.dataset.bad.go_on(rows)
        self._known |= self.dataset.bad_taken() if rows else {}

    def look_ahead(self) -> list[Future[PromptRow | BadRow]]:
        """Begin to load this rank's rows of the next global batch, beside whatever follows; no collective.

        What comes out of `next_rows` is the same with and without it: the results of these futures in this order, as
        long as no row of any rank turns out bad.
        """
        upcoming = self.sampler.upcoming()
        order = list(itertools.islice(upcoming, self.sampler.batch_size))
        self._replace_known(order, upcoming)
        mine = order[collectives.rank() :: collectives.world_size()]
        self._ahead = {index: self._ahead.get(index) or self._begun(index) for index in mine}
        return [self._ahead[index] for index in mine]

    def next_rows(self, step: int) -> list[PromptRow]:
        """This rank's rows r, r + W, ... of the next global batch. A collective. step: for the list of bad rows.

        Raises DataError for a bad row that may not be skipped, for a larger share of them than max_bad_share, and when
        no row is left.
        """
        order = self.sampler.next_batch()
        mine = PromptSampler.shard(range(len(order)), collectives.rank(), collectives.world_size())
        loaded: dict[int, PromptRow | BadRow] = {}  # by place in the batch
        while True:
            if self._known:
                self._replace_known(order, (self.sampler.take(1)[0] for _ in itertools.count()))
            missing = [place for place in mine if not isinstance(loaded.get(place), PromptRow)]
            wanted = {order[place] for place in missing}
            rows = {index: self._ahead.pop(index, None) or self._begun(index) for index in wanted}
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
            row = self.dataset.load_or_bad(index)
            if not self._bad_anywhere([(index, row)], step):
                rows.append(row)
        return rows

    def _begun(self, index: int) -> Future[PromptRow | BadRow]:
        return self._pool.submit(self.dataset.load_or_bad, index)

    def _bad_anywhere(self, results: list[tuple[int, PromptRow | BadRow]], step: int) -> bool:
        """Whether any rank met a bad row, which every rank then knows and counts. Raises DataError by the policy."""
        mine = {index: row for index, row in results if isinstance(row, BadRow)}
        met = collectives.all_gather_object(mine)
        if not any(met):
            return False
        self._known |= self.dataset.count_bad(met, f"step {step}")
        if len(self._known) == len(self.dataset):
            raise DataError(f"no usable row is left: {self.dataset.bad.summary()}")
        return True

    def _replace_known(self, order: list[int], following: Iterator[int]) -> None:
        """Put the indices that follow in the place of bad rows; batches that are mixed stay as they are cut."""
        for place, index in enumerate(order):
            others = following if self.sampler.mixing == "shuffled" else self.sampler.behind(index)
            while index in self._known:
                index = next(others)
            order[place] = index
