"""What a run needs of its host: thread settings, a free port, memory in bounds. Nothing here imports torch."""

import ctypes
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
SHARED_MEMORY = Path("/dev/shm")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of settings in glibc's malloc.h
_MIB = 2**20


def no_shared_memory() -> bool:
    """Whether processes find no room to share, or may not write there."""
    usable = os.access(SHARED_MEMORY, os.W_OK)  # root may write all but what is read-only
    return not usable or shutil.disk_usage(SHARED_MEMORY).free < _MIB


def nvidia_devices() -> int:
    """How many NVIDIA devices of the host this process may open, whether or not torch can use their driver."""
    found = [each for each in Path("/dev").glob("nvidia*") if each.name.removeprefix("nvidia").isdigit()]
    return len([each for each in found if os.access(each, os.R_OK | os.W_OK)])


def bound_spinning() -> None:
    """Bound how long idle OpenMP threads spin; before torch is imported, and unless the user has set it.

    GNU OpenMP lets a thread that waits for another one spin for some 15 ms. When something else has the other's core,
    each of the thousands of small parallel operations of a step waits that long: a step of a tiny model took 14 times
    as long beside a busy process. This bound outlasts the usual gap between two operations, so nothing is lost on a
    quiet machine (docs/benchmarks.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "50000")


def keep_freed_memory() -> None:
    """Let malloc keep up to 256 MiB of freed memory for the next tensors, unless the user has set it. glibc only.

    By default it gives large blocks back to the system at once, and the next tensor of that size is made of pages that
    the system clears one by one: thousands a forward on the host (docs/benchmarks.md has what that costs).
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 256 * _MIB)
        mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the most that glibc takes


def give_back_freed_memory(freed: int) -> bool:
    """Give all freed memory back to the system, if it may be worth its time: between tensors that stay, holes add up.

    freed: about how many bytes there are of it; for less than 32 MiB nothing is done. Returns whether anything was.
    glibc only.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or freed < 32 * _MIB:
        return False
    trim(0)
    return True


def in_buckets(items: Iterable[Item], most: int, size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Neighbours of together not too large a size, such as bytes.

    Args:
        items: in order.
        most: of a bucket; one item that is larger has a bucket of its own. Below 0 each has.
        size_of: an item.
    """
    bucket: list[Item] = []
    size = 0
    for item in items:
        own = size_of(item)
        if bucket and size + own > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += own
    if bucket:
        yield bucket


def free_port() -> int:
    """A TCP port that is free on the loopback address now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
