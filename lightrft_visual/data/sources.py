"""Files that rows are read from, each with random access, its rows' names for messages, and its media root."""

from __future__ import annotations

import csv
import io
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..config.given_files import ROOT_VARIABLES, located
from ..errors import DataError
from ..given import GivenRows, given, is_given, source_of
from ..runtime.hub import is_hub_name, load_data_set
from .arrow import FolderSource, ParquetSource
from .bad_rows import MAX_ROW_BYTES, check_whole_file


class RowSource(Protocol):
    """Rows of one data set. `folder`: where relative media paths start. Reading a broken row raises DataError."""

    folder: Path

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...

    def name(self, row: int) -> str:
        """The row for messages: "file:line" or "file:row n"."""


class JsonlSource:
    """One JSON object a line, found by byte offset, so that rows with inline images stay on disk. Blank lines skip."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        self._lines, self._offsets = array("q"), array("q")
        with open(path, "rb") as file:
            for number, (offset, line) in enumerate(_bounded_lines(file), start=1):
                if line.strip():
                    self._lines.append(number)
                    self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._lines)

    def name(self, row: int) -> str:
        """ "file:line", lines counted from 1."""
        return f"{self.path}:{self._lines[row]}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._offsets[row])
            line = file.readline(MAX_ROW_BYTES + 1)
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{self.name(row)}: the line is longer than {MAX_ROW_BYTES} bytes", "row too large")
        return parse_json(line, self.name(row))


def _bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of each line, of an overlong one only the first part: no line can fill the memory."""
    offset = 0
    while line := file.readline(MAX_ROW_BYTES):
        yield offset, line
        offset += len(line)
        while not line.endswith(b"\n") and (line := file.readline(MAX_ROW_BYTES)):
            offset += len(line)


def parse_json(text: bytes | str, name: str, advice: str = "") -> Any:
    """The value of a JSON text from outside. Raises DataError that starts with `name`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(f"{name}: JSON nested too deep", "nested too deep") from None
    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
        if "integer string conversion" in str(error):
            raise DataError(f"{name}: an integer of more than 4300 digits", "number too long") from None
        raise DataError(f"{name}: not valid JSON: {error}{advice}", "not JSON") from None


class JsonSource:
    """A JSON file that holds a list of rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        check_whole_file(path, "write it as .jsonl, one object a line, which is read row by row")
        rows = parse_json(path.read_bytes(), str(path), " (one object a line is .jsonl)")
        if not isinstance(rows, list):
            raise DataError(f"{path}: expected a list of rows, found {type(rows).__name__}")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, row: int) -> str:
        """ "file:row n", rows counted from 0."""
        return f"{self.path}:row {row}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]


class CsvSource(JsonSource):
    """A CSV file with a header, such as a metadata.csv; all values are text, an empty cell is None."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        limit = csv.field_size_limit(MAX_ROW_BYTES)  # a cell may hold an image as base64
        try:
            self._header, self._rows = _read_csv(_read_text(path))
        except csv.Error as error:
            raise DataError(f"{path}: not valid CSV: {error}") from None
        finally:
            csv.field_size_limit(limit)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        cells = self._rows[row]
        if isinstance(cells, csv.Error):
            raise DataError(f"{self.name(row)}: not valid CSV: {cells}", "not CSV")
        extra = cells[len(self._header) :]
        if extra:
            raise DataError(f"{self.name(row)}: {len(extra)} more field(s) than the header: {extra}", "not CSV")
        return dict(zip_longest(self._header, (cell or None for cell in cells)))


def _read_text(path: Path) -> str:
    """The text of a file, without a byte order mark; bytes that are not UTF-8 are found when their row is checked."""
    check_whole_file(path, "write it as .jsonl, which is read row by row")
    return path.read_bytes().decode("utf-8-sig", errors="surrogateescape")


def _read_csv(text: str) -> tuple[list[str], list[list[str] | csv.Error]]:
    """Column names and rows; for a row that cannot be read the error. csv.Error for a header that cannot be used."""
    first = next(csv.reader(io.StringIO(text, newline=""), strict=True), [])
    # Who writes `prompt, reference` writes its cells with a space as well.
    spaced = any(name.startswith(" ") for name in first[1:])
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=spaced)
    header = [name.strip() or f"unnamed_{place}" for place, name in enumerate(next(reader, []))]
    if not "".join(header).isprintable():  # a lone surrogate stands for a byte that is not UTF-8
        raise csv.Error(f"the header is not UTF-8 text: {ascii(header)[:200]}")
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise csv.Error(f"the header names column(s) {', '.join(repeated)} more than once")
    rows: list[list[str] | csv.Error] = []
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            rows.append(error)
            continue
        if cells is None:
            return header, rows
        if cells:
            rows.append(cells)


class TextSource(JsonSource):
    """A text file with one prompt a line; blank lines skip. Other signs that can end a line are part of the prompt."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        lines = _read_text(path).split("\n")
        self._rows = [{"prompt": line.strip()} for line in lines if line.strip()]


READERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonlSource,
    ".json": JsonSource,
    ".csv": CsvSource,
    ".txt": TextSource,
    ".parquet": ParquetSource,
}


def open_source(path: str | Path, split: str) -> RowSource:
    """The rows of a .jsonl, .json, .csv, .txt or .parquet file, of a Hugging Face data set folder's `split`, or those
    that a program holds (`python:NAME`), or of a data set of the hub (`owner/name`, `owner/name@revision`).

    A relative path may lie below a data root. Raises DataError for a path that does not exist, is
    of another kind, or holds no such split.
    """
    if is_given(path):
        return source_of(given(path), path, split)
    path = located(path)
    if not os.path.exists(path):
        where = "" if path.is_absolute() else f" (nor below ${ROOT_VARIABLES[0]})"
        if is_hub_name(str(path)):
            return GivenRows(load_data_set(str(path), split), str(path))
        raise DataError(f"data set not found: {path}{where}")
    if path.is_dir():
        return FolderSource(path, split)
    if path.suffix not in READERS:
        raise DataError(f"{path}: unknown kind of data file; known: {', '.join(READERS)}, or a data set folder")
    if not path.is_file():
        raise DataError(f"not a regular file: {path}")
    try:
        return READERS[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
