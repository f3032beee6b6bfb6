"""Handlers of signals that last as long as a `with`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, a signal calls `handler`; the one that was set before comes back, also after an error.

    Only the main thread may set handlers: in another one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    signal.signal(number, handler)
    try:
        yield
    finally:
        if before is not None:  # else it was set by C code, and Python cannot set it again
            signal.signal(number, before)
