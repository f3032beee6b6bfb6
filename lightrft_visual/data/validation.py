"""The held-out prompts: how ranks share them, so that all make the same number of collective calls; those that cannot
be had; their labels."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from ..errors import DataError
from ..runtime import collectives
from .bad_rows import BadRow
from .media import is_path, is_remote
from .prompts import PromptDataset, PromptRow, is_remote_row

logger = logging.getLogger(__name__)


def validation_shard_indices(num_prompts: int, *, rank: int, world_size: int) -> list[tuple[int, bool]]:
    """(index, is_real) of this rank's prompts: rank, rank + world_size, ... (FastVideo).

    Every rank gets ceil(num_prompts / world_size) entries. Where the stride runs past the end it starts over with
    is_real false: that prompt is generated once more, so that collectives match, and its result is dropped.

    Args:
        num_prompts: held-out prompts of all ranks together.
        rank: whose prompts are wanted.
        world_size: number of ranks.

    Raises:
        ValueError: for a negative count, world_size below one, or a rank outside [0, world_size).
    """
    if num_prompts < 0:
        raise ValueError(f"num_prompts is {num_prompts}; it must not be negative")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: rank must lie in [0, world_size) and world_size be positive")
    per_rank = -(-num_prompts // world_size)
    places = (rank + turn * world_size for turn in range(per_rank))
    return [(place % num_prompts, place < num_prompts) for place in places]


_THREADS = 8


@dataclass
class Fetched:
    """What this rank evaluates. indices: a row for each that was asked for, another one where it cannot be had;
    masked: whether it is such a stand-in. rows: remote rows with their media, by index. lost: rows of all ranks that
    could not be had."""

    indices: list[int]
    masked: list[bool]
    rows: dict[int, PromptRow] = field(default_factory=dict)
    lost: int = 0


class EvaluationRows:
    """The rows of an evaluation set. One that cannot be had ends the run, or by on_bad_row=skip it is masked: another
    row takes its place on its rank, so that all ranks stay in step, and counts for nothing. It is asked for again at
    the next evaluation.
    """

    def __init__(self, dataset: PromptDataset) -> None:
        self.dataset = dataset
        self._read = lru_cache(1)(dataset.__getitem__)  # a row's media are read one after the other
        self.remote = {index for index, row in enumerate(dataset) if is_remote_row(row)}

    def __iter__(self) -> Iterator[PromptRow]:
        """The rows, to be kept: media that lie inside a stored one are functions that read them there."""
        for index, row in enumerate(self.dataset):
            kinds = ("images", "videos") if self.dataset.is_stored(index) else ()
            yield replace(row, **{kind: self._kept(index, kind, getattr(row, kind)) for kind in kinds})

    def _kept(self, index: int, kind: str, media: list[Any]) -> list[Any]:
        def inside(number: int) -> Any:
            return getattr(self._read(index), kind)[number]

        return [each if is_path(each) or is_remote(each) else partial(inside, n) for n, each in enumerate(media)]

    def fetch(self, indices: list[int], step: int) -> Fetched:
        """This rank's rows for one evaluation. A collective. step: for the list of bad rows.

        Raises DataError for a row that may not be skipped, for more of them than max_bad_share of the set, and when a
        rank has no row left.
        """
        if not self.remote:
            return Fetched(indices, [False] * len(indices))
        wanted = sorted(self.remote & set(indices))
        with ThreadPoolExecutor(_THREADS) as pool:
            loaded = dict(zip(wanted, pool.map(self.dataset.load_or_bad, wanted)))
        rows = {index: row for index, row in loaded.items() if isinstance(row, PromptRow)}
        bad = {index: row for index, row in loaded.items() if isinstance(row, BadRow)}
        found = f"evaluation at step {step}"
        lost = len(self.dataset.count_bad(collectives.all_gather_object(bad), found, asked_again=True))
        usable = [index for index in indices if index not in bad]
        usable += [index for index in range(len(self.dataset)) if index not in self.remote]
        if not all(collectives.all_gather_object(bool(usable))):
            raise DataError(f"an evaluation has no usable row: {self.dataset.bad.summary()}")
        kept = [index if index not in bad else usable[0] for index in indices]
        return Fetched(kept, [index in bad for index in indices], rows, lost)


MAX_LABELS = 24  # with metrics of their own
OTHER_METRICS = re.compile("greedy(_.*)?|label_mean", re.DOTALL)  # what else stands behind eval_reward_


def measured_labels(labels: Sequence[str | None]) -> set[str]:
    """The labels of the held-out prompts that get metrics of their own: all, or where they are more than MAX_LABELS the
    most frequent ones, each of two prompts or more. A label that is different for every prompt tells nothing apart, and
    one of OTHER_METRICS would change what these say."""
    counts = Counter(label for label in labels if label is not None)
    taken = list(filter(OTHER_METRICS.fullmatch, counts))
    for label in taken:
        del counts[label]
    if taken and collectives.is_rank_0():
        logger.warning("no eval_reward_<label> for %s: other metrics have these names", ", ".join(taken))
    if len(counts) <= MAX_LABELS:
        return set(counts)
    chosen = {label for label, count in counts.most_common(MAX_LABELS) if count > 1}
    if collectives.is_rank_0():
        logger.warning(
            "the evaluation data has %d labels; eval_reward_<label> is reported for the %d most frequent that several "
            "prompts have, eval_reward counts all",
            len(counts),
            len(chosen),
        )
    return chosen
