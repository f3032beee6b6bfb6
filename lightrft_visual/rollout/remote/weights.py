"""Weights on their way to engines in other processes: whole versions in buckets, each with a checksum.

A version lies in memory that the workers of this host map (anonymous files, which vanish with the trainer), and in
Ray's object store for workers of other hosts. A worker checks all buckets before it takes over any tensor, so it has
either the old version or the new one. On this host it need not copy them: `take_over`.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn

from ...errors import RolloutError

T = torch.Tensor
BUCKET_BYTES = 64 * 2**20
THREADS = min(4, len(os.sched_getaffinity(0)))  # of the host, while nothing else runs on it
ALIGNED = 64  # bytes


class WeightsRefused(RolloutError):
    """A version whose bytes are not those that were posted; the worker keeps the weights that it has."""


@dataclass(frozen=True)
class TensorAt:
    """One tensor inside a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors in a row. path: of the memory file on the trainer's host; stored: the same in Ray's object store,
    for workers that cannot reach it."""

    tensors: tuple[TensorAt, ...]
    bytes: int
    checksum: int
    path: str | None = None
    stored: Any = None


@dataclass(frozen=True)
class Posted:
    """A version of the weights. number: counts the versions of a run, each of which is other weights."""

    number: int
    buckets: tuple[Bucket, ...]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(bucket.bytes for bucket in self.buckets)


@dataclass
class MemoryFile:
    """Memory of `size` bytes that other processes of the host can map by its path, while this object lives."""

    size: int
    _descriptor: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._descriptor = os.memfd_create("lightrft_weights")
        os.ftruncate(self._descriptor, self.size)
        self._map = mmap.mmap(self._descriptor, self.size)
        self.content = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Where a process of the same user and host finds it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class WeightPost:
    """The trainer's side: writes versions into memory files, of which `turns` take turns for each place.

    Workers may still read a version, and even compute with it where it lies, when the next ones are written: there are
    two turns where all take over a version at once, and one more for each batch that is generated ahead, which is how
    long work with an old version can take.

    store: puts an array into the object store and returns its reference; None where every worker shares this memory.
    shared: whether any does.
    """

    def __init__(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        turns: int = 2,
        store: Callable[[Any], Any] | None = None,
        shared: bool = True,
    ) -> None:
        self.turns = turns
        self.bucket_bytes, self.store, self.shared = bucket_bytes, store, shared
        self.number = 0
        self._files: dict[tuple[int, int], MemoryFile] = {}  # by (turn, place)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")

    def post(self, named_tensors: Iterable[tuple[str, T]]) -> Posted:
        """The next version: all tensors, written while others still come, a bucket by each thread."""
        self.number += 1
        buckets: list[Bucket] = []
        writing: deque[Future] = deque()
        for place, (tensors, size) in enumerate(self._cut(named_tensors)):
            if len(writing) == THREADS:  # under ZeRO-3 what waits is held whole
                buckets.append(writing.popleft().result())
            writing.append(self._threads.submit(self._bucket, self._file(place, size), tensors, size))
        return Posted(self.number, (*buckets, *(each.result() for each in writing)))

    def _cut(self, named_tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[list[tuple[str, T, int]], int]]:
        """((name, tensor, where it begins) of a bucket, its bytes). A tensor stays whole, however large."""
        bucket, size = [], 0
        for name, tensor in named_tensors:
            if bucket and size + tensor.nbytes > self.bucket_bytes:
                yield bucket, size
                bucket, size = [], 0
            bucket.append((name, tensor, size))
            size = -(-(size + tensor.nbytes) // ALIGNED) * ALIGNED
        if bucket:
            yield bucket, size

    def _bucket(self, file: MemoryFile, tensors: list[tuple[str, T, int]], size: int) -> Bucket:
        content, digest = file.content[:size].numpy(), xxhash.xxh3_64()
        ends = [*(start for _, _, start in tensors[1:]), size]
        for (_, tensor, start), end in zip(tensors, ends):
            into = file.content[start : start + tensor.nbytes]
            if tensor.nbytes:
                into.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            digest.update(content[start:end])  # at once, while it may still be in a cache
        layout = tuple(
            TensorAt(name, tensor.dtype, tuple(tensor.shape), start, tensor.nbytes) for name, tensor, start in tensors
        )
        checksum = digest.intdigest()
        stored = self.store(content) if self.store is not None else None
        return Bucket(layout, size, checksum, file.path if self.shared else None, stored)

    def _file(self, place: int, size: int) -> MemoryFile:
        key = (self.number % self.turns, place)
        if key not in self._files or self._files[key].size < size:
            self._files[key] = MemoryFile(max(size, ALIGNED))
        return self._files[key]


def reachable(path: str) -> bool:
    """Whether this process can map a memory file: it is on the trainer's host, and the same user's."""
    return os.access(path, os.R_OK)


class MappedFiles:
    """Memory files of the trainer that this process maps. They are kept: finding the pages of a new map takes about as
    long as copying them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, T]] = {}  # by path: (inode, content)

    def content(self, bucket: Bucket) -> T:
        """The bytes of a bucket, or more of its file. Raises WeightsRefused where the file cannot be mapped."""
        try:
            inode = os.stat(bucket.path).st_ino  # a path may come back with another file
            known, content = self._known.get(bucket.path, (None, None))
            if known != inode or len(content) < bucket.bytes:
                content = self._map(bucket.path)
                self._known[bucket.path] = inode, content
            return content[: bucket.bytes]
        except (OSError, ValueError) as error:
            raise WeightsRefused(f"the trainer's memory {bucket.path} cannot be mapped: {error}") from error

    @staticmethod
    def _map(path: str) -> T:
        # Shared, so that `take_over` knows it; nobody but the trainer writes.
        return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def received(
    posted: Posted, fetch: Callable[[Any], Any] | None = None, files: MappedFiles | None = None
) -> list[tuple[str, T]]:
    """The tensors of a version, all of whose buckets were checked; views of what was mapped or fetched, to be copied.

    fetch: gets an array of the object store. files: those that this process has mapped already. Raises WeightsRefused
    for other bytes than those that were posted.
    """
    files = files or MappedFiles()

    def checked(place: int, bucket: Bucket) -> T:
        near = bucket.path is not None and (bucket.stored is None or reachable(bucket.path))
        content = files.content(bucket) if near else torch.from_numpy(fetch(bucket.stored))
        checksum = xxhash.xxh3_64_intdigest(content[: bucket.bytes].numpy())
        if checksum != bucket.checksum:
            raise WeightsRefused(
                f"bucket {place} of weight version {posted.number} has the checksum {checksum:016x}, posted was "
                f"{bucket.checksum:016x}: it was damaged on its way, and the worker keeps its weights"
            )
        return content

    with ThreadPoolExecutor(THREADS) as threads:
        contents = list(threads.map(checked, range(len(posted.buckets)), posted.buckets))
    return [
        (at.name, content[at.start : at.start + at.bytes].view(at.dtype).view(at.shape))
        for bucket, content in zip(posted.buckets, contents)
        for at in bucket.tensors
    ]


@torch.no_grad()
def take_over(parameter: nn.Parameter, tensor: T) -> None:
    """Give an engine's parameter what a worker received: by a copy, or as it lies in memory that is shared with the
    trainer, which leaves a version alone for as long as workers may compute with it (`WeightPost`)."""
    mapped = tensor.device.type == "cpu" and tensor.is_shared()
    same = (tensor.device, tensor.dtype, tensor.shape) == (parameter.device, parameter.dtype, parameter.shape)
    if mapped and same:
        parameter.data = tensor
    else:
        parameter.copy_(tensor)
