"""Builds of C++ extensions: by one process of a host at a time, in a folder of this environment's own.

DeepSpeed compiles parts of itself at their first use, under a lock file of torch's builder. A process that is killed
while it compiles leaves that file, and every later start would wait for it for ever and say nothing. So a run builds
what it needs under a lock of its own, which ends with its process, and takes such a file away first.
Torch's default folder is shared by all environments of a Python version: two of them that run in turn would compile
everything anew at each start.
"""

import fcntl
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ..errors import ConfigError, refused_as

logger = logging.getLogger(__name__)

OTHER_HOSTS = 600.0  # seconds that a lock may be the work of a process on another host that shares the folder
PATIENCE = 5.0  # seconds after which a line says what is waited for
CPU_ADAM = "CPUAdamBuilder"  # its Adam on the host


def build_first(name: str) -> None:
    """Compile and load this part of DeepSpeed before it asks for it; the first process of a host that comes does.

    What this host cannot build is left out: DeepSpeed does without it, or says why it cannot.
    """
    with building():
        builder = get_accelerator().create_op_builder(name)
        if builder is not None and builder.is_compatible(verbose=False):
            with _told_late("compiling DeepSpeed's %s, once for this environment: a minute or two", builder.NAME):
                builder.load(verbose=False)


@contextmanager
def building() -> Iterator[Path]:
    """Inside, this process alone builds in this environment's folder, where no lock of a dead process is left."""
    folder = own_folder()
    with refused_as(ConfigError, f"builds go to {folder}: set TORCH_EXTENSIONS_DIR to a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".building", "w")
    with file:
        with _told_late("waiting for another process of this environment, which builds in %s", folder):
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        remove_stale_locks(folder)
        yield folder


@contextmanager
def _told_late(*told: Any) -> Iterator[None]:
    """A warning where what is inside takes longer than `PATIENCE`."""
    timer = threading.Timer(PATIENCE, logger.warning, told)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_folder() -> Path:
    """Where this process builds from now on: this environment's folder, or what TORCH_EXTENSIONS_DIR says."""
    from torch.utils.cpp_extension import get_default_build_root  # looks for CUDA's compiler as it is imported

    return Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(get_default_build_root()) / environment_name())))


def environment_name() -> str:
    """A folder name for what is compiled in this environment: of its Python, its torch, and where it lies."""
    where = hashlib.sha256(f"{sys.prefix} {torch.__file__} {deepspeed.__file__}".encode()).hexdigest()[:8]
    return f"py{sys.version_info.major}{sys.version_info.minor}_torch{torch.__version__}_{where}"


def remove_stale_locks(folder: Path) -> None:
    """Remove lock files of torch's builder that no process has open."""
    for lock in folder.glob("*/lock"):
        if not is_held(lock):
            logger.warning("removing %s: the process that built there is gone", lock)
            lock.unlink(missing_ok=True)


def is_held(lock: Path) -> bool:
    """Whether a process of this host has the lock file open; it counts as held where it is another user's, or young
    and the run has ranks on other hosts."""
    try:
        wanted = os.stat(lock)
    except FileNotFoundError:
        return False
    if wanted.st_uid != os.getuid():
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            held = os.stat(descriptor)
        except OSError:  # closed since, or another user's
            continue
        if os.path.samestat(held, wanted):
            return True
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return ranks > here and time.time() - wanted.st_mtime < OTHER_HOSTS
