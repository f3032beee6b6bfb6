"""Builds of C++ extensions by several processes: a lock that its owner left behind is taken away, with a line.

DeepSpeed compiles parts of itself at their first use, under a lock file of torch's builder. A process that is killed
while it compiles leaves the file, and every later start would wait for it for ever and say nothing. Each environment
builds in a folder of its own: torch's default is shared by all environments of a Python version, and two of them that
run in turn would compile everything anew at each start.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch.utils.file_baton import FileBaton

from ..errors import ConfigError

logger = logging.getLogger(__name__)

OTHER_HOSTS = 600.0  # seconds that a lock may be the work of a process on another host that shares the folder


LOOKING = 0.05  # share of a wait that may go into looking for the lock's owner
SHARED_MEMORY = "deepspeed_shm_comm"  # DeepSpeed's collectives between ranks of one host without accelerators


def watch_locks() -> None:
    """Let torch's builder look for the owners of locks, in this process, and build in this environment's folder."""
    from torch.utils import cpp_extension  # looks for CUDA's compiler, and says so, when it is imported

    cpp_extension.FileBaton = OwnedBaton
    root = Path(cpp_extension.get_default_build_root())
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(root / environment_name()))


def environment_name() -> str:
    """A folder name for what is compiled in this environment: of its Python, its torch, and where it lies."""
    where = hashlib.sha256(f"{sys.prefix} {torch.__file__} {deepspeed.__file__}".encode()).hexdigest()[:8]
    return f"py{sys.version_info.major}{sys.version_info.minor}_torch{torch.__version__}_{where}"


def leave_out_shared_memory() -> None:
    """Let DeepSpeed start without its collectives over shared memory, which it would compile: one rank has nobody to
    exchange with."""
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False


class OwnedBaton(FileBaton):
    """torch's lock file, which counts only while the process that made it lives and holds it open."""

    def try_acquire(self) -> bool:
        """Whether the lock is this process's own now; a lock without an owner is removed first."""
        with open(f"{self.lock_file_path}.check", "w") as checked:
            fcntl.flock(checked, fcntl.LOCK_EX)  # of several ranks that find a stale lock one removes it
            if super().try_acquire():
                return True
            if owner(self.lock_file_path) is not None:
                return False
            logger.warning("removing %s: the process that built there is gone", self.lock_file_path)
            Path(self.lock_file_path).unlink(missing_ok=True)
            return bool(super().try_acquire())

    def wait(self) -> None:
        """Until the owner is done. Raises ConfigError where it ends without having finished."""
        builder = owner(self.lock_file_path) or "another process"  # it may end while it is looked for
        logger.warning("waiting for %s, which builds under %s", builder, self.lock_file_path)
        look_again = 0.0  # the owner is looked for in the open files of all processes, which takes its time
        while os.path.exists(self.lock_file_path):
            time.sleep(self.wait_seconds)
            began = time.monotonic()
            if began < look_again:
                continue
            if owner(self.lock_file_path) is None and os.path.exists(self.lock_file_path):
                raise ConfigError(f"the process that built under {self.lock_file_path} ended before it was done")
            ended = time.monotonic()
            look_again = ended + (ended - began) / LOOKING


def owner(lock: str) -> str | None:
    """Who holds the lock file open, for a message; None for a file that nobody of this host has open.

    A lock of another user, or a young one where the run has ranks on other hosts, counts as owned.
    """
    try:
        wanted = os.stat(lock)
    except FileNotFoundError:
        return None
    if wanted.st_uid != os.getuid():
        return f"a process of user {wanted.st_uid}"
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            held = os.stat(descriptor)
        except OSError:  # closed since, or another user's
            continue
        if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
            return f"process {descriptor.parts[2]}"
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks > here and time.time() - wanted.st_mtime < OTHER_HOSTS:
        return "a process of another host"
    return None
