"""What a user's function changes around itself is put back: streams, folder, warnings, gradients.

A reward function may do all of this for its own good. The run that called it still needs its output, its folder and
its gradients afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)
STREAMS = {"stdout": 1, "stderr": 2}
FORKED = 70  # exit code of a child that a user's function made by os.fork and let run on (EX_SOFTWARE)
LIBRARIES = (f"{Path(__file__).parents[2]}/", f"{sysconfig.get_path('stdlib')}/", "<frozen ", "<string>")
_one_at_a_time = threading.Lock()
_said: set[str] = set()


def is_users(filename: str) -> bool:
    """Whether a line of this file is a user's own, neither ours nor a library's."""
    return not filename.startswith(LIBRARIES) and "site-packages" not in filename


@contextlib.contextmanager
def put_back(what: str) -> Iterator[None]:
    """Put back afterwards what a user's code changed, and say once what it was. `what`: the code's name.

    Of calls that run at once, in threads, the first one watches.
    """
    if not _one_at_a_time.acquire(blocking=False):
        yield
        return
    process = os.getpid()
    changes = [_folder(), _streams(), _warnings(), _torch_modes()]
    try:
        yield
    finally:
        if os.getpid() != process:
            told = f"error: {what} forked a process that came back into the run; that process ends"
            print(told, file=sys.stderr, flush=True)
            os._exit(FORKED)
        for told in filter(None, (restore() for restore in changes)):
            _say_once(f"{what} {told}")
        _one_at_a_time.release()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s; it is put back after each call", text)


Restore = Callable[[], str | None]


def _folder() -> Restore:
    try:
        before = os.getcwd()
    except OSError:  # somebody removed it: there is no way back
        return lambda: None

    def restore() -> str | None:
        try:
            if os.getcwd() == before:
                return None
        except OSError:
            pass  # it stands in a folder that is gone
        try:
            os.chdir(before)
        except OSError as error:
            log.warning("the working directory %s cannot be entered again: %s", before, error)
        return "changes the working directory"

    return restore


class BorrowedStream:
    """A stream of the run in a user's hands: all but closing it reaches the stream, which others hold as well."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.closed = stream, False

    def close(self) -> None:
        """Only remembered."""
        self.closed = True

    def __enter__(self) -> BorrowedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _streams() -> Restore:
    """stdout and stderr, as Python's objects and as the process's files."""
    lent: dict[str, tuple[BorrowedStream, int]] = {}
    for name, number in STREAMS.items():
        with contextlib.suppress(OSError):  # a process may have been started without it
            lent[name] = BorrowedStream(getattr(sys, name)), os.dup(number)
            setattr(sys, name, lent[name][0])

    def restore() -> str | None:
        changed = [name for name, (stream, spare) in lent.items() if _taken_back(name, stream, spare)]
        return f"closes or replaces {' and '.join(changed)}" if changed else None

    return restore


def _taken_back(name: str, lent: BorrowedStream, spare: int) -> bool:
    """Whether the stream was closed or replaced; as it was before in any case."""
    changed = lent.closed or getattr(sys, name) is not lent
    setattr(sys, name, lent.stream)
    try:
        os.fstat(STREAMS[name])
    except OSError:
        os.dup2(spare, STREAMS[name])
        changed = True
    os.close(spare)
    return changed


def _warnings() -> Restore:
    """Filters that turn warnings into errors hold for the user's code alone; others may stay."""
    before = list(warnings.filters)

    def restore() -> str | None:
        added = [each for each in warnings.filters if each[0] == "error" and each not in before]
        if not added:
            return None
        kept = [each for each in warnings.filters if each not in added]
        warnings.resetwarnings()  # which also makes Python forget what it has decided by the old ones
        warnings.filters.extend(kept)
        return "turns warnings into errors"

    return restore


def _torch_modes() -> Restore:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def restore() -> str | None:
        if torch.is_grad_enabled() == gradients and torch.get_default_dtype() == dtype:
            return None
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        return "changes torch's gradient mode or default dtype"

    return restore
