"""Evaluation rows whose media are remote: fetched at each evaluation, where some may be gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ..errors import DataError
from ..runtime import collectives
from .bad_rows import BadRow
from .prompts import PromptDataset, PromptRow, is_remote_row

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
        self.remote = {index for index, row in enumerate(dataset) if is_remote_row(row)}

    def fetch(self, indices: list[int], step: int) -> Fetched:
        """This rank's rows for one evaluation. A collective. step: for the list of bad rows.

        Raises DataError for a row that may not be skipped, for more of them than max_bad_share of the set, and when a
        rank has no row left.
        """
        if not self.remote:
            return Fetched(indices, [False] * len(indices))
        wanted = sorted(self.remote & set(indices))
        with ThreadPoolExecutor(_THREADS) as pool:
            loaded = dict(zip(wanted, pool.map(self._load, wanted)))
        rows = {index: row for index, row in loaded.items() if isinstance(row, PromptRow)}
        bad = {index: row for index, row in loaded.items() if isinstance(row, BadRow)}
        lost = self._count(bad, step)
        usable = [index for index in indices if index not in bad]
        usable += [index for index in range(len(self.dataset)) if index not in self.remote]
        if not all(collectives.all_gather_object(bool(usable))):
            raise DataError(f"an evaluation has no usable row: {self.dataset.bad.summary()}")
        kept = [index if index not in bad else usable[0] for index in indices]
        return Fetched(kept, [index in bad for index in indices], rows, lost)

    def _load(self, index: int) -> PromptRow | BadRow:
        try:
            return self.dataset.load(index)
        except DataError as error:
            return BadRow.of(error, self.dataset.name(index))

    def _count(self, mine: dict[int, BadRow], step: int) -> int:
        """How many rows of all ranks are bad; every rank knows and counts them."""
        bad = {index: row for part in collectives.all_gather_object(mine) for index, row in part.items()}
        for row in bad.values():
            if self.dataset.policy(row) == "error":
                raise row.as_error()
            self.dataset.bad.add(replace(row, found=f"evaluation at step {step}"))
        self.dataset.bad.check()
        return len(bad)
