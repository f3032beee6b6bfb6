"""Rows that a run leaves out: counted by cause, bounded by `max_bad_share`, listed in `bad_rows.jsonl`."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataError, refused_as
from ..runtime import collectives
from ..runtime.files import read_jsonl
from .forms import is_missing

logger = logging.getLogger(__name__)


FILE_NAME = "bad_rows.jsonl"
LONG_PROMPT = "long prompt"  # the one cause that `on_long_prompt` decides about, instead of `on_bad_row`
_SHOWN = 5
TOLD: dict[tuple[Any, ...], object] = {}  # what `warn_once` has said


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. source: "file:row". found: "start", or the rollout step that met it."""

    source: str
    cause: str
    message: str
    found: str = "start"

    @classmethod
    def of(cls, error: DataError, source: str) -> BadRow:
        """The row that `error` speaks of; its message names the row at its beginning."""
        message = str(error)
        return cls(source, cause_of(error), message if source in message else f"{source}: {message}")

    def as_error(self) -> DataError:
        """What ends a run that leaves no row out."""
        flag = "on_long_prompt" if self.cause == LONG_PROMPT else "on_bad_row"
        return DataError(f"{self.message} (in runs --{flag} skip leaves such rows out)", self.cause)


def cause_of(error: BaseException) -> str:
    """The cause of a chain of errors: that of the innermost one that has any."""
    found, current = "other", error
    while current is not None:
        found = getattr(current, "cause", None) or found
        current = current.__cause__
    return found


class TooManyBadRows(DataError):
    """More rows are bad than a run may leave out. rows: those of the data set."""

    def __init__(self, message: str, rows: BadRows) -> None:
        super().__init__(message)
        self.rows = rows


class BadRows:
    """The bad rows of one data set. All ranks hold the same ones; rank 0 says and writes them.

    max_share: of bad rows among those looked at, above which the run ends.
    """

    def __init__(self, name: str, max_share: float) -> None:
        self.name, self.max_share = name, max_share
        self.rows: dict[str, BadRow] = {}
        self.inspected = 0
        self._path: Path | None = None
        self._listed: set[str] = set()

    @property
    def causes(self) -> Counter[str]:
        """Rows left out, by cause."""
        return Counter(row.cause for row in self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: BadRow) -> None:
        """Count a row once, however often it comes up; the first few are said."""
        if row.source in self.rows:
            return
        self.rows[row.source] = row
        if len(self.rows) <= _SHOWN and collectives.is_rank_0():
            logger.warning("left out: %s", row.message)
        if self._path is not None:
            self._write([row])

    def summary(self) -> str:
        """One line: how many rows are left out of how many, and why."""
        causes = ", ".join(f"{count} x {cause}" for cause, count in self.causes.most_common())
        share = len(self.rows) / max(1, self.inspected)
        return f"{self.name}: {len(self.rows)} of {self.inspected} rows left out ({share:.1%}): {causes}"

    def check(self) -> None:
        """Raise TooManyBadRows when more than `max_share` of the rows are bad."""
        if len(self.rows) > self.max_share * self.inspected:
            firsts = {row.cause: row.message for row in reversed(self.rows.values())}  # the first row of each cause
            table = "\n".join(f"  {count} x {cause}: {firsts[cause]}" for cause, count in self.causes.most_common())
            told = f"more than max_bad_share = {self.max_share:g}. Repair the data, or raise --max_bad_share"
            raise TooManyBadRows(f"{self.summary()}; that is {told}\n{table}", self)

    def with_those_of_the_start(self, met: Iterable[BadRow]) -> BadRows:
        """Apart from what was met at other times: `met` of one time, beside rows that never come."""
        own = BadRows(self.name, self.max_share)
        start = [row for row in self.rows.values() if row.found == BadRow.found]
        own.rows, own.inspected = {row.source: row for row in (*start, *met)}, self.inspected
        return own

    def report(self) -> None:
        """Say the summary, where there is anything to say."""
        if self.rows and collectives.is_rank_0():
            logger.warning("%s", self.summary())

    def go_on(self, met: Iterable[BadRow]) -> None:
        """Take up an earlier process's, which were said and listed when they were found."""
        self.rows |= {row.source: row for row in met}

    def write_to(self, path: Path, listed: set[str]) -> None:
        """List the rows found so far in `path`, and from now on each further one at once; listed: sources that it has
        already, of all who write there."""
        self._path, self._listed = path, listed
        self._write(list(self.rows.values()))

    def _write(self, rows: list[BadRow]) -> None:
        new = [row for row in rows if row.source not in self._listed]
        if not new or not collectives.is_rank_0():
            return
        self._listed.update(row.source for row in new)
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in new)


def warn_once(told: str, *arguments: Any) -> None:
    """Of what many rows have alike: at the first, on rank 0. Threads that read rows come here at the same time."""
    mine = object()
    if collectives.is_rank_0() and TOLD.setdefault((told, *arguments), mine) is mine:
        logger.warning(told, *arguments)


def list_bad_rows(output_dir: str | Path, resumed: bool, *found: BadRows) -> None:
    """Keep `bad_rows.jsonl` of a run from here on; a run that starts afresh begins a new list. Rank 0 writes."""
    path = Path(output_dir) / FILE_NAME
    if not resumed and collectives.is_rank_0():
        path.unlink(missing_ok=True)
    listed = {row.get("source") for row in read_jsonl(path)} if collectives.is_rank_0() else set()
    for rows in found:
        rows.write_to(path, listed)


MAX_DEPTH = 32  # lists and mappings inside each other
MAX_INTEGER_BITS = 1000  # about 300 digits: more than that does not fit a float
MAX_CAPTION = 100_000  # characters of a caption; no text encoder reads that much
MAX_ROW_BYTES = 128 * 2**20  # one row of a .jsonl file, images as base64 included
MAX_WHOLE_FILE_BYTES = 2 * 2**30  # of files that are read as a whole


def check_values(row: Any) -> None:
    """Refuse what is no row, and one whose values later stages cannot write, print or turn into numbers, wherever they
    hide in it.

    Raises DataError naming the column: for text that is not valid Unicode (a lone surrogate), integers of more than
    about 300 digits, and nesting deeper than MAX_DEPTH.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be a mapping of columns, not {type(row).__name__}", "row form")
    pending: list[tuple[Any, int, Any]] = [(value, 1, column) for column, value in row.items()]
    pending += [(column, 1, column) for column in row]
    while pending:
        value, depth, column = pending.pop()
        if isinstance(value, str):
            _check_text(value, column)
        elif isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise DataError(f"column {column!r} holds an integer of more than 300 digits", "number too long")
        elif isinstance(value, (Mapping, list, tuple)):
            if depth > MAX_DEPTH:
                raise DataError(f"column {column!r} is nested deeper than {MAX_DEPTH} levels", "nested too deep")
            inner = [*value, *value.values()] if isinstance(value, Mapping) else value
            pending += [(each, depth + 1, column) for each in inner]


def most_characters(tokenizer: Any, tokens: int) -> int:
    """Of a text that may have `tokens` tokens: none stands for more than the longest of the vocabulary. A longer text
    need not be tokenized to be too long, which would take hundreds of bytes a character."""
    return tokens * max(map(len, tokenizer.get_vocab()))


def check_reference(reference: Any) -> None:
    """Raise DataError for a reference that no answer equals: one that is or holds NaN or an infinity. pandas writes
    NaN, NA or NaT where something is missing."""
    pending = [reference]
    while pending:
        value = pending.pop()
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            pending += value.ravel().tolist()
        elif is_missing(value) or not _is_finite(value):
            raise DataError(f"the reference holds {value}, which no answer equals", "reference not finite")
        if isinstance(value, (Mapping, list, tuple)):
            pending += value.values() if isinstance(value, Mapping) else value


def _is_finite(value: Any) -> bool:
    """Of a number, an array or a tensor of them; what is none has nothing infinite."""
    if isinstance(value, Decimal):
        return value.is_finite()
    if isinstance(value, torch.Tensor):
        with refused_as(DataError, "the reference holds a tensor that cannot be read"):
            return bool(torch.isfinite(value).all())
    numbers = isinstance(value, float) or getattr(getattr(value, "dtype", None), "kind", "") in ("f", "c")
    return not numbers or bool(np.isfinite(value).all())


def _check_text(text: str, column: Any) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"column {ascii(column)} holds text that is not valid Unicode: {ascii(text[error.start])} "
            f"at character {error.start}",
            "text not Unicode",
        ) from None


def check_whole_file(path: Path, advice: str) -> None:
    """Refuse a file that is read as a whole and would fill the memory of every process. Raises DataError."""
    size = path.stat().st_size
    if size > MAX_WHOLE_FILE_BYTES:
        raise DataError(f"{path}: {size} bytes are above the limit of {MAX_WHOLE_FILE_BYTES}; {advice}")
