"""Rows that a run leaves out: counted by cause, bounded by `max_bad_share`, listed in `bad_rows.jsonl`."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import DataError
from ..runtime import collectives
from ..runtime.files import read_jsonl

logger = logging.getLogger(__name__)
FILE_NAME = "bad_rows.jsonl"
LONG_PROMPT = "long prompt"  # the one cause that `on_long_prompt` decides about, instead of `on_bad_row`
_SHOWN = 5


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
        return DataError(f"{self.message} (--{flag} skip leaves such rows out)", self.cause)


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
            raise TooManyBadRows(
                f"{self.summary()}; that is more than max_bad_share = {self.max_share:g}. Repair the data, or raise "
                f"--max_bad_share\n{self._table()}",
                self,
            )

    def _table(self) -> str:
        """A line for each cause, the most frequent first, with the first row of it."""
        firsts = {row.cause: row.message for row in reversed(self.rows.values())}
        return "\n".join(f"  {count} x {cause}: {firsts[cause]}" for cause, count in self.causes.most_common())

    def report(self) -> None:
        """Say the summary, where there is anything to say."""
        if self.rows and collectives.is_rank_0():
            logger.warning("%s", self.summary())

    def write_to(self, path: Path) -> None:
        """List the rows found so far in `path`, and from now on each further one at once."""
        self._path = path
        self._write(list(self.rows.values()))

    def _write(self, rows: list[BadRow]) -> None:
        if not rows or not collectives.is_rank_0():
            return
        known = {row.get("source") for row in read_jsonl(self._path)}
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows if row.source not in known)


def list_bad_rows(output_dir: str | Path, resumed: bool, *found: BadRows) -> None:
    """Keep `bad_rows.jsonl` of a run from here on; a run that starts afresh begins a new list. Rank 0 writes."""
    path = Path(output_dir) / FILE_NAME
    if not resumed and collectives.is_rank_0():
        path.unlink(missing_ok=True)
    for rows in found:
        rows.write_to(path)
