"""Bounds on what a file may hold, checked before anything works with it: size, depth, numbers, text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError

MAX_DEPTH = 32  # lists and mappings inside each other
MAX_INTEGER_BITS = 1000  # about 300 digits: more than that does not fit a float
MAX_ROW_BYTES = 128 * 2**20  # one row of a .jsonl file, images as base64 included
MAX_WHOLE_FILE_BYTES = 2 * 2**30  # of files that are read as a whole


def check_values(row: Mapping[str, Any]) -> None:
    """Refuse a row whose values later stages cannot write, print or turn into numbers, wherever they hide in it.

    Raises DataError naming the column: for text that is not valid Unicode (a lone surrogate), integers of more than
    about 300 digits, and nesting deeper than MAX_DEPTH.
    """
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


def check_reference(reference: Any) -> None:
    """Raise DataError for a reference that no answer equals: one that is or holds NaN or an infinity. pandas writes
    NaN where a number is missing."""
    pending = [reference]
    while pending:
        value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"the reference holds {value}, which no answer equals", "reference not finite")
        if isinstance(value, (list, tuple)):
            pending += value


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
