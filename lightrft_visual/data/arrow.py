"""Rows of Parquet files and Hugging Face data set folders, decoded when they are asked for."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..errors import DataError

CACHE_BYTES = 2**30  # decoded row groups that a process keeps of one file
# What pyarrow raises on damaged or unusual content; its own errors do not cover text that is not UTF-8 and the like.
_ARROW_ERRORS = (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError)


class ParquetSource:
    """A Parquet file, of which a row group is decoded when one of its rows is read, and kept while there is room.

    Images stay in their stored form, {"bytes", "path"}. A damaged page makes the rows of its group bad, not the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path.parent
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            metadata = self._file.metadata
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        except _ARROW_ERRORS as error:
            raise DataError(f"{path}: not a parquet file: {error}") from None
        if any(count < 0 for count in counts):
            raise DataError(f"{path}: not a parquet file: its footer is damaged")
        self._starts = [0, *accumulate(counts)]
        self._groups: OrderedDict[int, pyarrow.Table] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def name(self, row: int) -> str:
        """ "file:row n", rows counted from 0."""
        return f"{self.path}:row {row}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        group = bisect_right(self._starts, row) - 1
        try:
            return _row_of(self._group(group), row - self._starts[group])
        except _ARROW_ERRORS as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{self.name(row)}: row group {group} cannot be read: {text}", "damaged page") from None

    def _group(self, number: int) -> pyarrow.Table:
        with self._lock:
            if number not in self._groups:
                table = self._file.read_row_group(number, use_threads=False)
                wanted = self._starts[number + 1] - self._starts[number]
                if len(table) != wanted:
                    raise ValueError(f"it holds {len(table)} rows, the footer says {wanted}")
                self._groups[number] = table
                self._forget()
            self._groups.move_to_end(number)
            return self._groups[number]

    def _forget(self) -> None:
        """Drop the groups that were not used for longest, but for the newest, until the others fit."""
        while len(self._groups) > 1 and sum(table.nbytes for table in self._groups.values()) > CACHE_BYTES:
            self._groups.popitem(last=False)


class FolderSource:
    """One split of a Hugging Face data set folder, read from disk as rows are asked for."""

    def __init__(self, path: Path, split: str) -> None:
        self.path, self.folder = path, path
        self._table = _load_folder(path, split).with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def name(self, row: int) -> str:
        """ "folder:row n", rows counted from 0."""
        return f"{self.path}:row {row}"

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        try:
            return _row_of(self._table[row : row + 1], 0)
        except _ARROW_ERRORS as error:
            raise DataError(f"{self.name(row)}: cannot be read: {error}", "damaged page") from None


def _row_of(table: pyarrow.Table, row: int) -> Mapping[str, Any]:
    return table.slice(row, 1).to_pylist()[0]


def _load_folder(path: Path, split: str) -> Any:
    """A folder of save_to_disk, or one of data files that `datasets` understands."""
    import datasets  # slow to import, and needed for folders alone

    saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except (datasets.exceptions.DatasetsError, *_ARROW_ERRORS) as error:
        raise DataError(f"{path}: not a data set folder: {error}") from error
    if isinstance(found, datasets.Dataset):
        return found
    if split not in found:
        raise DataError(f"{path}: no split {split!r}; it has: {', '.join(found)}")
    return found[split]
