"""Formats of a checkpoint's manifest: older ones are brought up to date when they are read, newer ones are refused.

1: without `model`. A manifest that names no format is of this one.
2: `model` says what was trained, see `fingerprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError

FORMAT = 2


class NewerFormat(CheckpointError):
    """A checkpoint of a version of this package that is newer than this one."""


def _from_1(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "model": None}  # not known: nothing is compared on resume


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}


def up_to_date(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A manifest's content in the present format; the file stays as it is.

    Raises NewerFormat, and CheckpointError for a format that never was, both with what to do.
    """
    found, current = content.get("format", 1), dict(content)
    if type(found) is not int or found < min(MIGRATIONS):
        raise CheckpointError(f"{path} has format {found!r}, which no version of lightrft_visual writes")
    if found > FORMAT:
        wrote = (content.get("versions") or {}).get("lightrft_visual") or "a newer one"
        raise NewerFormat(
            f"{path} has format {found}, this version of lightrft_visual reads up to {FORMAT}: resume with the version "
            f"that wrote it ({wrote}), or name an older checkpoint by resume_from"
        )
    for each in range(found, FORMAT):
        current = MIGRATIONS[each](current)
    return {**current, "format": FORMAT}
