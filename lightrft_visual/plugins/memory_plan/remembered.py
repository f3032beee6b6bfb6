"""What a decoder holds in a pass, kept on disk: of the same shape it is counted once, not at every start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from ...runtime.paths import cache_root
from .meta import Held

logger = logging.getLogger(__name__)

COUNTED_BY = ("torch", "transformers", "peft")  # packages whose code runs on the meta tensors
PACKAGE = Path(__file__).parents[2]


def remembered(shape: str, count: Callable[[], Held]) -> Held:
    """count(), or what it returned before. shape: all that the answer depends on but for the code, as text.

    Other versions of the packages or of this one's own files count anew. A cache that cannot be written is done
    without.
    """
    name = hashlib.sha256(f"{_code()} {shape}".encode()).hexdigest()
    path = cache_root() / "plans" / f"{name[:32]}.json"
    try:
        return Held(*json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or not whole
        held = count()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(held))
        part.replace(path)
    except OSError as error:
        logger.debug("the plan's figures are not kept: %s", error)
    return held


@cache
def _code() -> str:
    """A digest of what counts: versions of packages, and the files of the rooms that take part."""
    found = hashlib.sha256(" ".join(f"{name} {version(name)}" for name in COUNTED_BY).encode())
    for room in ("plan", "models"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
