"""How a run of a plan begins in a copy of another one's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def planned_copy(folder: Path, word: str | None) -> dict[str, Any]:
    """What a plan says of a word "copy:NAME" or "copy:NAME@STEP"; with a step, the copy has no checkpoint behind it."""
    if word is None:
        return {"copy_of": None}
    name, _, step = word.removeprefix("copy:").partition("@")
    return {"copy_of": str(folder / name), "step": int(step) if step else None}


def begin_as_copy(entry: dict[str, Any]) -> None:
    """On rank 0, before the run; nothing where the plan says so."""
    if entry["copy_of"] is None:
        return
    last = None if entry["step"] is None else f"checkpoint-{entry['step']:06d}"

    def behind(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if last and name.startswith("checkpoint-") and name > last]

    shutil.copytree(entry["copy_of"], entry["folder"], ignore=behind)
