"""What a run says and does while it starts. Nothing here imports torch."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_BEGAN = time.perf_counter()


def log_stage(stage: str) -> None:
    """One line on rank 0, with the seconds since this module was imported: what begins now."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[{time.perf_counter() - _BEGAN:5.1f} s] {stage}", flush=True)


@contextmanager
def importing() -> Iterator[None]:
    """Inside, Python's garbage collector rests, and it never looks at what was imported.

    Libraries make millions of objects that stay; walking through them again and again takes a sixth of the imports'
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Inside, Python's garbage collector looks after every 10,000 new objects, not after every 700.

    Most of what a start makes stays, so looking at it often finds next to nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(10_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
