"""crash.log: everything about an error that ended a run, for whoever looks into it."""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from ..runtime.files import writable
from ..runtime.masking import mask_command, mask_text
from .environment import versions

logger = logging.getLogger(__name__)
FILE_NAME = "crash.log"
LONGEST_PART = 200_000  # characters of a traceback or configuration


@dataclass(frozen=True)
class Ending:
    """What was going on when the error came. config: as YAML."""

    rank: int
    world_size: int
    stage: str
    config: str


def write_crash_log(folder: str | Path, error: BaseException, ending: Ending) -> Path | None:
    """Append the full traceback, versions, command and configuration to `crash.log`, secrets masked.

    Each rank that fails adds a part of its own, in one write. Returns the file, or None where it cannot be written: the
    error that ends the run must be told anyway.
    """
    path = Path(folder) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(writable(_part(error, ending)).encode())
    except OSError as failure:
        logger.warning("%s cannot be written: %s", path, failure)
        return None
    return path


def _part(error: BaseException, ending: Ending) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = f"rank {ending.rank} of {ending.world_size}, process {os.getpid()}, stage {ending.stage}"
    command = shlex.join(mask_command([os.path.basename(sys.executable), *sys.argv]))
    told = "".join(traceback.format_exception(error))
    return "\n".join(
        [
            f"===== {now}, {where}",
            f"command: {command}",
            f"versions: {', '.join(f'{name} {version}' for name, version in versions().items())}",
            "",
            mask_text(_shortened(told)).rstrip(),
            "",
            "configuration:",
            mask_text(_shortened(ending.config)).rstrip(),
            "",
            "",
        ]
    )


def _shortened(text: str) -> str:
    half = LONGEST_PART // 2
    return text if len(text) <= LONGEST_PART else f"{text[:half]}\n... shortened ...\n{text[-half:]}"
