"""Files that rows are read from, each with random access, its rows' names for messages, and its media root."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import pyarrow.parquet

from ..errors import DataError


class RowSource(Protocol):
    """Rows of one data set. `folder`: where relative media paths start. Reading a broken row raises DataError."""

    folder: Path

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...

    def name(self, row: int) -> str: ...


class JsonlSource:
    """One JSON object a line, found by byte offset, so that rows with inline images stay on disk. Blank lines skip."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        self._places: list[tuple[int, int]] = []  # line number, byte offset
        offset = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._places.append((number, offset))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def name(self, row: int) -> str:
        return f"{self.path}:{self._places[row][0]}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._places[row][1])
            line = file.readline()
        try:
            return json.loads(line)
        except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
            raise DataError(f"{self.name(row)}: not valid JSON: {error}") from None


class JsonSource:
    """A JSON file that holds a list of rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        try:
            rows = json.loads(path.read_bytes())
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error} (one object a line is .jsonl)") from None
        if not isinstance(rows, list):
            raise DataError(f"{path}: expected a list of rows, found {type(rows).__name__}")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, row: int) -> str:
        return f"{self.path}:row {row}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]


class CsvSource(JsonSource):
    """A CSV file with a header, such as a metadata.csv; all values are text."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        try:
            with open(path, newline="", encoding="utf-8") as file:
                self._rows = list(csv.DictReader(file, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not valid CSV: {error}") from None

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        values = self._rows[row]
        extra = values.get(None)  # where DictReader puts the fields that no column of the header names
        if extra:
            raise DataError(f"{self.name(row)}: {len(extra)} more field(s) than the header: {extra}")
        return values


class TextSource(JsonSource):
    """A text file with one prompt a line; blank lines skip."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text: {error}") from None
        self._rows = [{"prompt": line.strip()} for line in lines if line.strip()]


class ArrowSource:
    """Rows of an Arrow table or Hugging Face data set in their stored form: images stay {"bytes", "path"}."""

    def __init__(self, path: Path, table: Any, folder: Path) -> None:
        self.path, self.folder, self._table = path, folder, table

    @classmethod
    def from_parquet(cls, path: Path) -> ArrowSource:
        try:
            return cls(path, pyarrow.parquet.read_table(path, memory_map=True), path.parent)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: not a parquet file: {error}") from None

    @classmethod
    def from_folder(cls, path: Path, split: str) -> ArrowSource:
        return cls(path, _load_folder(path, split).with_format("arrow"), path)

    def __len__(self) -> int:
        return len(self._table)

    def name(self, row: int) -> str:
        return f"{self.path}:row {row}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        if isinstance(self._table, pyarrow.Table):
            return self._table.slice(row, 1).to_pylist()[0]
        return self._table[row : row + 1].to_pylist()[0]


READERS: dict[str, Callable[[Path], RowSource]] = {
    ".jsonl": JsonlSource,
    ".json": JsonSource,
    ".csv": CsvSource,
    ".txt": TextSource,
    ".parquet": ArrowSource.from_parquet,
}


def open_source(path: str | Path, split: str) -> RowSource:
    """The rows of a .jsonl, .json, .csv, .txt or .parquet file, or of a Hugging Face data set folder's `split`.

    Raises DataError for a path that does not exist, is of another kind, or holds no such split.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"data set not found: {path}{_hub_advice(str(path))}")
    if path.is_dir():
        return ArrowSource.from_folder(path, split)
    if path.suffix not in READERS:
        raise DataError(f"{path}: unknown kind of data file; known: {', '.join(READERS)}, or a data set folder")
    return READERS[path.suffix](path)


def _hub_advice(name: str) -> str:
    """How to save a hub data set, for a name such as `hiyouga/geometry3k`; nothing for what can only be a path."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or Path(name).suffix in READERS:
        return ""
    folder = name.partition("/")[2]
    return (
        "; data sets are not fetched from the hub. If that is a hub name, save it as a folder first, and name the "
        f"folder: python -c \"import datasets; datasets.load_dataset('{name}').save_to_disk('{folder}')\""
    )


def _load_folder(path: Path, split: str) -> Any:
    """A folder of save_to_disk, or one of data files that `datasets` understands."""
    import datasets  # slow to import, and needed for folders alone

    saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        raise DataError(f"{path}: not a data set folder: {error}") from error
    if isinstance(found, datasets.Dataset):
        return found
    if split not in found:
        raise DataError(f"{path}: no split {split!r}; it has: {', '.join(found)}")
    return found[split]
