"""One event loop in a daemon thread, for coroutines started from ordinary code."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

log = logging.getLogger(__name__)


class BackgroundLoop:
    """Runs coroutines beside the caller; `submit` returns at once with a concurrent future."""

    def __init__(self, name: str = "reward-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """The loop, which goes on when a coroutine of a user's stops it, or a task of its own calls sys.exit."""
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException as error:
                log.warning("a task in the background ended by %s", type(error).__name__)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Run a coroutine in the loop's thread; the future holds its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the coroutine's result; its exception is raised here."""
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Stop the loop and wait for its thread."""
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


_shared: BackgroundLoop | None = None
_lock = threading.Lock()


def shared_loop() -> BackgroundLoop:
    """The process-wide loop, started on first use."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = BackgroundLoop()
        return _shared
