"""Checkpoints that are written while the run goes on.

Inside `Copies.collecting`, whoever has a file of a checkpoint to write hands over what belongs into it. It is copied to
the host, and a thread writes it. The thread makes no collectives, which belong to the run's own thread: ranks tell rank
0 what they have written by a file each in the staging folder.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...errors import CheckpointError
from ..collectives import is_rank_0, rank, world_size
from ..files import follow_umask, full_disk_named, write_atomic
from ..host_copies import HostMemory, bytes_of
from .manifest import describe_files, list_files

PART = ".part-{}.json"  # what a rank has written
POLL = 0.05  # seconds between two looks for the others' parts
LAST_WAIT = 60.0  # seconds that a run which fails waits for the other ranks' parts

_collecting: ContextVar[Copies | None] = ContextVar("collecting", default=None)


def write_file(path: Path, state: Any, write: Callable[[Any], None]) -> None:
    """Write a file now; inside `Copies.collecting` later, with a copy of the state.

    Args:
        path: of the file.
        state: what belongs into it.
        write: makes the file from the state.
    """
    copies = _collecting.get()
    if copies is None:
        write(state)
    else:
        copies.waiting.append((path, partial(write, copies.of(state))))


class Copies:
    """What is to be written into files, copied to host memory that is kept for the next time."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Path, Callable[[], None]]] = []
        self._memory = HostMemory()
        self._taken: list[torch.Tensor] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, `write_file` leaves files to `write`."""
        token = _collecting.set(self)
        try:
            yield
        finally:
            _collecting.reset(token)

    def of(self, state: Any) -> Any:
        """The state with every storage below it copied; tensors that share one still do, as in the file."""
        storages: dict[int, torch.UntypedStorage] = {}
        known: dict[int, Any] = {}
        for tensor in (each for each in tree_leaves(state) if isinstance(each, torch.Tensor)):
            source = tensor.untyped_storage()
            if source._cdata not in storages:
                self._taken.append(self._memory.copy_of(bytes_of(source)))
                storages[source._cdata] = self._taken[-1].untyped_storage()
            copied = torch.empty(0, dtype=tensor.dtype)
            copied.set_(storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
            copied.requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, tensor.requires_grad)
            vars(copied).update(deepcopy(vars(tensor)))  # of DeepSpeed
            known[id(tensor)] = copied
        return deepcopy(state, known)

    def write(self, root: Path) -> list[Path]:
        """Write what waits; a full disk is named by `root`. Returns the files."""
        paths = []
        while self.waiting:
            path, action = self.waiting.pop(0)
            full_disk_named(root, action)
            paths.append(path)
        return paths

    def release(self) -> None:
        """Keep the memory for the next copies; what was of no use to the last ones goes."""
        self.waiting.clear()
        self._memory.free.clear()
        for each in self._taken:
            self._memory.give_back(each)
        self._taken = []


class Originals(Copies):
    """What is to be written at once, so that nothing of it is copied."""

    def of(self, state: Any) -> Any:
        return state


@contextmanager
def collectives_first() -> Iterator[None]:
    """Files of `write_file` are written at the end of this, unless `Copies.collecting` leaves them for later: inside
    DeepSpeed's saving the others would wait in a collective for a rank whose disk is full, or slow."""
    if _collecting.get() is not None:
        yield
        return
    held = Originals()
    with held.collecting():
        yield
    for _, action in held.waiting:
        action()


class SaveBehind(threading.Thread):
    """Writes one checkpoint: this rank's files, and on rank 0, once all ranks have written theirs, the rest.

    publish: of the ranks' files with sizes and hashes. error: of this rank.
    """

    def __init__(self, staging: Path, copies: Copies, publish: Callable[[dict[str, dict[str, Any]]], None]):
        super().__init__(name="checkpoint", daemon=True)  # a process that is ended does not wait for its disk
        self.staging, self.copies, self.publish = staging, copies, publish
        self.error: Exception | None = None
        self.written, self._given_up = threading.Event(), threading.Event()

    def run(self) -> None:
        """In the thread."""
        try:
            self._write()
        except Exception as error:  # raised where the run's own thread asks for it
            self.error = error
        finally:
            self.written.set()

    def _write(self) -> None:
        paths = self.copies.write(self.staging.parent)
        files = describe_files(self.staging, [path.relative_to(self.staging).as_posix() for path in paths])
        if not is_rank_0():
            write_atomic(self.staging / PART.format(rank()), json.dumps(files))
            return
        self.written.set()
        for other in range(1, world_size()):
            files |= self._part(self.staging / PART.format(other))
        follow_umask(self.staging)
        others = [name for name in list_files(self.staging) if name not in files]  # of libraries, written at once
        files |= describe_files(self.staging, others)
        self.publish(dict(sorted(files.items())))

    def _part(self, path: Path) -> dict[str, dict[str, Any]]:
        while not path.is_file():
            if self._given_up.wait(POLL):
                raise CheckpointError(f"{path.name} is missing: another rank has not written its files")
        content = json.loads(path.read_bytes())
        path.unlink()
        return content

    def own_files_written(self) -> None:
        """Wait for this rank's files. Raises what writing them raised."""
        self.written.wait()
        if self.error is not None:
            raise self.error

    def finished(self) -> None:
        """Wait for all of it. Raises what it raised."""
        self.join()
        if self.error is not None:
            raise self.error

    def give_up(self, limit: float = 0.0) -> None:
        """Wait for this rank's files, and so many seconds for those of the others and for what rank 0 makes of them,
        which an error of this rank ends; then end."""
        self.written.wait()
        ends = time.monotonic() + limit
        self.join(limit)
        self._given_up.set()
        self.join()
        while self.error is None and self.staging.exists() and time.monotonic() < ends:
            time.sleep(POLL)
