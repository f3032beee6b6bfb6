"""Files that rows are read from, each with random access, its rows' names for messages, and its media root."""

import csv
import glob
import io
import json
import os
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pyarrow
import pyarrow.parquet

from ..config.given_files import ROOT_VARIABLES, located
from ..errors import DataError
from ..given import GivenRows, given, is_given, json_in, source_of, with_json
from ..runtime.hub import is_hub_name, load_data_set
from ..runtime.presence import ranks_on_host
from .bad_rows import MAX_ROW_BYTES, check_whole_file

CACHE_BYTES = 2**30  # decoded row groups that a process keeps at least of all its Parquet files
FREE_SHARE = 0.1  # of the host's free memory that they may fill, all ranks together
PART_ROWS = 1024  # that are decoded at once
_ANOTHER = "the file is another one than when it was opened"
# What pyarrow raises on damaged or unusual content; its own errors do not cover text that is not UTF-8 and the like.
_ARROW_ERRORS = (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError)


class JsonlSource:
    """One JSON object a line, found by byte offset, so that rows with inline images stay on disk. Blank lines skip."""

    stored = True

    def __init__(self, path: Path) -> None:
        self.path, self._place = path, path.absolute()  # whatever the working directory is then
        self.folder = self._place.parent
        self._lines, self._offsets = array("q"), array("q")
        with open(path, "rb") as file:
            self._opened = os.fstat(file.fileno())
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
        with open(self._place, "rb") as file:
            found, known = os.fstat(file.fileno()), self._opened
            another = found.st_ino != known.st_ino and found.st_mtime_ns != known.st_mtime_ns  # some mounts number anew
            offset = self._offsets[row]
            file.seek(max(offset - 1, 0))
            moved = offset and file.read(1) != b"\n"  # written anew in place
            if another or moved or found.st_size < known.st_size:
                raise DataError(f"{self.name(row)}: {_ANOTHER}", "file replaced")
            line = file.readline(MAX_ROW_BYTES + 1)
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{self.name(row)}: the line is longer than {MAX_ROW_BYTES} bytes", "row too large")
        return _parse_json(line, self.name(row), " (a list of rows is .json)" if line.startswith(b"[") else "")


def _bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of each line, of an overlong one only the first part: no line can fill the memory."""
    offset = 0
    while line := file.readline(MAX_ROW_BYTES):
        yield offset, line
        offset += len(line)
        while not line.endswith(b"\n") and (line := file.readline(MAX_ROW_BYTES)):
            offset += len(line)


def _parse_json(text: bytes | str, name: str, advice: str = "") -> Any:
    """The value of a JSON text from outside. Raises DataError that starts with `name`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError(f"{name}: JSON nested too deep", "nested too deep") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not in UTF-8 ({error}): save the file in UTF-8{advice}", "not JSON") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise DataError(f"{name}: an integer of more than 4300 digits", "number too long") from None
        raise DataError(f"{name}: not valid JSON: {error}{advice}", "not JSON") from None


class NumberedRows:
    """A file whose rows are counted from 0."""

    stored = False

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent.absolute()

    def name(self, row: int) -> str:
        """ "file:row n"."""
        return f"{self.path}:row {row}"


class JsonSource(NumberedRows):
    """A JSON file that holds a list of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        check_whole_file(path, "write it as .jsonl, one object a line, which is read row by row")
        rows = _parse_json(path.read_bytes(), str(path), " (one object a line is .jsonl)")
        if not isinstance(rows, list):
            raise DataError(f"{path}: expected a list of rows, found {type(rows).__name__}")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]


class CsvSource(JsonSource):
    """A CSV file with a header, such as a metadata.csv; all values are text, an empty cell is None."""

    def __init__(self, path: Path) -> None:
        NumberedRows.__init__(self, path)
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
    if any("\ud800" <= sign <= "\udfff" for sign in "".join(header)):  # a byte that is not UTF-8
        raise csv.Error(f"the header is not UTF-8 text: {ascii(header)[:200]}")
    if repeated := _repeated(header):
        raise csv.Error(f"the header names column(s) {repeated} more than once")
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


def _repeated(names: list[str]) -> str:
    return ", ".join(name for name, count in Counter(names).items() if count > 1)


class TextSource(JsonSource):
    """A text file with one prompt a line; blank lines skip. Other signs that can end a line are part of the prompt."""

    def __init__(self, path: Path) -> None:
        NumberedRows.__init__(self, path)
        lines = _read_text(path).split("\n")
        self._rows = [{"prompt": line.strip()} for line in lines if line.strip()]


class ParquetSource(NumberedRows):
    """A Parquet file, of which a row group is decoded when one of its rows is read, and kept while there is room.

    Images stay in their stored form, {"bytes", "path"}. A damaged page makes the rows of its group bad, not the file.
    The file is open only while a group is read, so that any number of files can be one data set.
    """

    stored = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._place = path.absolute()  # whatever the working directory is then
        try:
            self._stamp = _stamp(path)
            with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
                self._metadata, schema = file.metadata, file.schema_arrow
            counts = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
            names = schema.names
            self._json = json_in(schema)
        except _ARROW_ERRORS as error:
            raise DataError(f"{path}: not a parquet file: {error}") from None
        if any(count < 0 for count in counts):
            raise DataError(f"{path}: not a parquet file: its footer is damaged")
        if repeated := _repeated(names):
            raise DataError(f"{path}: its schema names column(s) {repeated} more than once")
        self._starts = [0, *accumulate(counts)]
        self.groups: dict[int, pyarrow.Table] = {}  # what is decoded; _kept adds and takes away
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        group = bisect_right(self._starts, row) - 1
        try:
            found = self._group(group).slice(row - self._starts[group], 1).to_pylist(maps_as_pydicts="lossy")
            return with_json(found[0], self._json)
        except _ARROW_ERRORS as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{self.name(row)}: row group {group} cannot be read: {text}", "damaged page") from None

    def _group(self, number: int) -> pyarrow.Table:
        with self._lock:
            table = self.groups.get(number)
            if table is None:
                table = self._read(number)
                wanted = self._starts[number + 1] - self._starts[number]
                if len(table) != wanted:
                    raise ValueError(f"it holds {len(table)} rows, the footer says {wanted}")
            _kept.use(self, number, table)
            return table

    def _read(self, number: int) -> pyarrow.Table:
        if _stamp(self._place) != self._stamp:
            raise ValueError(_ANOTHER)
        with pyarrow.parquet.ParquetFile(self._place, metadata=self._metadata, memory_map=True) as file:
            # In parts: pyarrow reads no nested column of more than 2 GiB in one piece.
            parts = file.iter_batches(PART_ROWS, [number], use_threads=False)
            return pyarrow.Table.from_batches(parts, file.schema_arrow)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Another one where another file was written there."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _free_share() -> float:
    """Bytes of this rank's part of FREE_SHARE."""
    return FREE_SHARE * psutil.virtual_memory().available / ranks_on_host()


class _Kept:
    """Decoded row groups of all Parquet files of a process: those used last, up to CACHE_BYTES or `_free_share`."""

    def __init__(self) -> None:
        # Sizes, the least recently used first. The groups lie with their sources and go with them.
        self._sizes: OrderedDict[tuple[weakref.ref[ParquetSource], int], int] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def use(self, source: ParquetSource, number: int, table: pyarrow.Table) -> None:
        key = weakref.ref(source), number
        with self._lock:
            if key not in self._sizes:
                source.groups[number], self._sizes[key] = table, table.nbytes
                self._bytes += self._sizes[key]
            self._sizes.move_to_end(key)
            if self._bytes <= CACHE_BYTES or self._bytes <= _free_share():
                return
            for key in [key for key in self._sizes if key[0]() is None]:
                self._bytes -= self._sizes.pop(key)
            most = max(CACHE_BYTES, _free_share())
            while len(self._sizes) > 1 and self._bytes > most:  # the newest stays, however large
                (owner, oldest), size = self._sizes.popitem(last=False)
                self._bytes -= size
                if (other := owner()) is not None:
                    del other.groups[oldest]


_kept = _Kept()


def _load_folder(path: Path, split: str) -> Any:
    """A folder of save_to_disk, or one of data files that `datasets` understands."""
    import datasets  # slow to import, and needed for folders alone

    saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
    whole = str(path if saved else path.resolve())
    if "::" in whole or (not saved and glob.escape(whole) != whole):
        told = "the library datasets reads [ * ? and :: in the path of a folder as a pattern, also of other folders"
        raise DataError(f"{whole}: {told}: rename it, or name its files")
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except (datasets.exceptions.DatasetsError, *_ARROW_ERRORS) as error:
        several = "Config name is missing" in str(error)
        way_on = " (name one of its files, or give load_dataset(...) from Python)" if several else ""
        raise DataError(f"{path}: not a data set folder: {error}{way_on}") from error
    if isinstance(found, datasets.Dataset):
        return found
    if split not in found:
        raise DataError(f"{path}: no split {split!r}; it has: {', '.join(found)}")
    return found[split]


# Rows of one data set, by number. Reading a broken one raises DataError; `folder`: where relative media paths start;
# `name`: a row for messages, as "file:line" or "file:row n"; `stored`: each reading makes the row anew, and alike.
RowSource = JsonlSource | JsonSource | ParquetSource | GivenRows
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
        return GivenRows(_load_folder(path, split), str(path), path)
    if path.suffix not in READERS:
        raise DataError(f"{path}: unknown kind of data file; known: {', '.join(READERS)}, or a data set folder")
    if not path.is_file():
        raise DataError(f"not a regular file: {path}")
    try:
        return READERS[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
