"""Files that are whole or not there, and JSON lines that survive a crash in their middle."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file as a whole: a reader, or a crash, sees the old or the new text and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(writable(data).encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def follow_umask(folder: Path) -> None:
    """Let files below a folder be read by whom the umask lets read new files; safetensors lets their owner alone."""
    probe = folder / ".mode"
    probe.touch()
    allowed = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode | allowed != mode:
                path.chmod(mode | allowed)


def append_line(path: Path, text: str) -> None:
    """Append in one write, so that a killed process leaves whole lines."""
    with open(path, "ab", buffering=0) as file:
        file.write(writable(text).encode())


def writable(text: str) -> str:
    """The text in characters that UTF-8 has: a lone surrogate, which data may hold, becomes its escape, as \\ud800.

    Inside a JSON string that is the very escape that reads back as the surrogate.
    """
    return text.encode(errors="backslashreplace").decode()


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON; numbers that JSON lacks (NaN, infinities) become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {str(key): clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value if isinstance(value, str | int | float | bool | None) else str(value)

    return json.dumps(clean(record), ensure_ascii=False, allow_nan=False)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file; an empty list where there is no file.

    A torn last line, which a killed process leaves, is left out. So is any other line that is no record, with a warning
    that counts them: the rest of the file is worth showing, but nothing that this package writes leaves such a line.
    """
    records, broken = [], []
    # Not splitlines(): text may hold U+2028 and the like, which end a line for Python but not in JSON lines.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is not None:
            records.append(record)
        elif line.strip() and number < len(lines):
            broken.append(number)
    if broken:
        text = "%s: %d line(s) are no JSON records and are left out, the first of them line %d"
        logger.warning(text, path, len(broken), broken[0])
    return records


def parse_record(line: str) -> dict[str, Any] | None:
    """The JSON object of a line, or None for anything else."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
