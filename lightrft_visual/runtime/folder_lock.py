"""One live run a folder: a lock that the kernel releases when the process that holds it ends, however it ends."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError, FolderInUse

logger = logging.getLogger(__name__)
FILE_NAME = "run.lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # what file systems say of a lock that somebody else holds


class FolderLock:
    """A folder that is this run's alone until `release`, the end of the process, or the end of this object.

    `take` makes it. The lock is one of `flock` on a file in the folder, so it also holds between the hosts of a shared
    file system. Processes that are forked from this one do not hold it.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.file = path, file
        _held.add(self)
        self._finalizer = weakref.finalize(self, _let_go, path, file, os.getpid())

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """Lock the folder, which is made where it is missing. None, with a warning, where its file system has no locks.

        Raises FolderInUse, which names the process that holds it, and ConfigError where the folder cannot be written.
        """
        path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while True:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                if not _locked(file, folder):
                    return None
                if _is_at(path, file):
                    break
                os.close(file)  # its owner has just released, and removed, it
            lock = cls(path, file)
            with lock.released_on_error():
                os.truncate(file, 0)
                os.write(file, json.dumps(_myself()).encode())
        except OSError as error:
            raise ConfigError(f"output_dir {folder} cannot be written: {error}") from error
        return lock

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release it when what is inside fails."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others have the folder. Again it does nothing."""
        _held.discard(self)
        self._finalizer()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process that outlives a killed run must not keep its folder."""
    for lock in list(_held):
        os.close(lock.file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _locked(file: int, folder: Path) -> bool:
    """Whether the file is locked now; False, with a warning, where that cannot be. Raises FolderInUse."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(file, 1000, 0).decode(errors="replace")
        os.close(file)
        if error.errno in TAKEN:
            raise FolderInUse(
                f"output_dir {folder} belongs to a run that is still going: {_in_words(holder)}. Wait for its end or "
                "stop it, or give another output_dir"
            ) from None
        told = "output_dir %s: its file system has no file locks (%s); see that no second run writes to it meanwhile"
        logger.warning(told, folder, error)
        return False
    return True


def _is_at(path: Path, file: int) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _myself() -> dict[str, str | int]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def _in_words(holder: str) -> str:
    """The process that holds a lock, of what it wrote into the file."""
    try:
        content = json.loads(holder)
        return f"process {content['pid']} on host {content['host']}, since {content['since']}"
    except (ValueError, KeyError, TypeError):  # it has the lock, and will write this in a moment
        return "a process that has just started"


def _let_go(path: Path, file: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked process, which has closed its file already
        return
    path.unlink(missing_ok=True)  # before the lock is gone: afterwards it may be another run's
    os.close(file)
