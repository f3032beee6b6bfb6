"""Weights from the trainer's device to those of the workers, by a process group that nothing else knows.

Rank 0 of it is the trainer's rank 0, the others are workers of one device each.

It runs over NCCL and, where there is no accelerator, over gloo. vLLM's own `weight_transfer` asks for NCCL, for every
name and shape before the first byte, and serves vLLM alone.
"""

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ....config.placement import AUTO
from ....errors import ConfigError, RolloutError
from ....rollout.weight_sync import BUCKET_BYTES, WeightsRefused, cut
from ....runtime.vendor_patches import variable

T = torch.Tensor
logger = logging.getLogger(__name__)
SENT_BYTES = BUCKET_BYTES // 2  # of a bucket; two are alive, on either side
LIMIT_SECONDS = 120.0  # without progress, after which a transfer is given up
GRACE_SECONDS = 10.0  # in which workers are told of that; who has not answered then is started again
POLL_SECONDS = 0.001
SAMPLED_BYTES = 2 * 2**20  # at the head of a tensor, of which its checksum is
MOST_FAILURES = 3  # transfers one after the other, after which weights go by the host
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


class TransferFailed(RolloutError):
    """A version that did not come through; what a worker has of it is no version at all."""


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group find each other. limit: `LIMIT_SECONDS`, or another."""

    address: str
    port: int
    size: int
    limit: float


class Group:
    """A member's process group. Raises TransferFailed where the others do not come or a transfer does not move."""

    def __init__(self, store: dist.Store, rank: int, size: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        self.device = torch.device(get_accelerator().current_device_name())
        with failing():
            self._backend = _backend(store, rank, size, limit)

    def buffer(self, size: int) -> T:
        """Bytes on this member's device."""
        return torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)

    def broadcast(self, buffer: T) -> Any:
        """Begin to send rank 0's buffer, or to receive it; the work to `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        with failing():
            return self._backend.broadcast([buffer], options)

    def finish(self, work: Any, stopped: Callable[[], str | None]) -> None:
        """Wait for it. stopped: why nobody should."""
        _wait(work.is_completed, stopped, self.limit)
        with failing():
            work.wait()

    def check(self, stopped: Callable[[], str | None]) -> None:
        """Send a few bytes, or receive them and look at them: NCCL connects its members only now."""
        wanted = torch.arange(64, dtype=torch.uint8, device=self.device)
        buffer = wanted.clone() if self.rank == 0 else torch.zeros_like(wanted)
        self.finish(self.broadcast(buffer), stopped)
        if not torch.equal(buffer, wanted):
            raise TransferFailed("other bytes came than were sent")

    def close(self) -> None:
        """Let go of the others, also of those that do not answer."""
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(GRACE_SECONDS)

    def _end(self) -> None:
        with suppress(RuntimeError):
            self._backend.abort()
        del self._backend


def over_cards() -> bool:
    """Whether devices of this kind are connected by NCCL."""
    return get_accelerator().communication_backend_name() == "nccl"


def _backend(store: dist.Store, rank: int, size: int, limit: float) -> Any:
    timeout = timedelta(seconds=limit)
    if not over_cards():
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    # Without the watchdog that ends the process of a member whose peer is gone; read from the environment alone.
    with variable(BLOCKING, "1"):
        return dist.ProcessGroupNCCL(store, rank, size, timeout)


@contextmanager
def failing() -> Iterator[None]:
    """Inside, what torch.distributed or a device raises is TransferFailed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RolloutError):
            raise
        raise TransferFailed(str(error).split("\n")[0].split(". ")[0]) from error


def _wait(ready: Callable[[], bool], stopped: Callable[[], str | None], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not ready():
        reason = stopped()
        if reason is None and time.monotonic() > until:
            reason = f"nothing moved for {seconds:g} s"
        if reason is not None:
            raise TransferFailed(reason)
        time.sleep(POLL_SECONDS)


def checksum(tensor: T) -> T:
    """Of the head of a tensor, as int64 on its device: the same on every kind of device, other for swapped bytes."""
    flat = tensor.detach().reshape(-1)[: SAMPLED_BYTES // max(1, tensor.element_size())].contiguous()
    content = flat.view(torch.uint8).long() + 1
    weights = torch.arange(1, len(content) + 1, device=content.device) * 0x9E3779B1
    return (content * weights).sum()


def _sampled(number: int, index: int, count: int) -> int:
    """Which of a bucket's tensors is checked: another one in each version."""
    return (number + index) % count


class _Calls:
    """A method of several workers, called at once. arguments: by the worker's rank in the group."""

    def __init__(self, workers: Sequence[Any], method: str, arguments: Callable[[int], tuple]) -> None:
        self.workers = list(workers)
        self.errors: dict[str, Exception] = {}
        self._threads = [
            threading.Thread(target=self._call, args=(each, method, arguments(index + 1)), daemon=True)
            for index, each in enumerate(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, worker: Any, method: str, arguments: tuple) -> None:
        try:
            worker.call(method, *arguments)
        except Exception as error:
            self.errors[worker.name] = error

    def failure(self) -> str | None:
        """What a worker that failed says: one that is gone before those that were left by it."""
        failed = sorted(self.errors.items(), key=lambda each: isinstance(each[1], TransferFailed))
        return next((f"worker {name}: {error}" for name, error in failed), None)

    def wait(self, seconds: float | None = None) -> dict[int, Any]:
        """Until all have returned; those that have not in time, by their ranks. None: as long as a worker may take to
        answer."""
        until = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        calls = enumerate(zip(self.workers, self._threads), start=1)
        return {rank: worker for rank, (worker, thread) in calls if thread.is_alive()}


@dataclass
class WeightSender:
    """The trainer's side. For each version `ready`, then `through` to its end, then `finish`.

    A transfer that fails ends nothing: the caller hands the version over by the host. After `MOST_FAILURES` in a row,
    or where the workers cannot be reached at all, this is not tried any more. A worker that is not back is no failure.

    Args:
        pool: whose workers are sent to.
        address: of this host, for the workers.
        required: whether workers that cannot be reached at all are an error.
        limit: seconds, see `LIMIT_SECONDS`.
        bucket_bytes: see `SENT_BYTES`.
    """

    pool: Any
    address: str
    required: bool = False
    limit: float = LIMIT_SECONDS
    bucket_bytes: int = SENT_BYTES
    failure: str | None = field(default=None, init=False)  # of the present version
    failures: int = field(default=0, init=False)
    met: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)
    _group: Group | None = field(default=None, init=False)
    _store: dist.Store | None = field(default=None, init=False)
    _calls: _Calls | None = field(default=None, init=False)
    _members: list[Any] = field(default_factory=list, init=False)

    def ready(self, number: int) -> bool:
        """Whether all workers wait for this version. One that was started again joins anew."""
        if self.failures >= MOST_FAILURES:
            return False
        known = self._group is not None and self._members == self.pool.workers
        for joins in (False, True) if known else (True,):
            self.failure, self.number = None, number
            try:
                if joins:
                    self._meet()
                self._calls = _Calls(self._members, "take", lambda rank: (number,))
                self._expect("ready", number)
                return True
            except (TransferFailed, RuntimeError) as error:
                answered = self._calls is None or self._calls.failure() is not None
                self._give_up(str(error))
                if not answered:
                    break
        self._told(counted=not answered)  # who is still being started joins later
        return False

    def _meet(self) -> None:
        """Make a group with all workers that there are."""
        self._calls = None
        self.close()
        self._members, timeout = list(self.pool.workers), timedelta(seconds=self.limit)
        self._store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        meeting = Meeting(self.address, self._store.port, len(self._members) + 1, self.limit)
        self._calls = _Calls(self._members, "join", lambda rank: (meeting, rank))
        self._expect("joined", 0)
        self._store.set("go", "")
        self._group = Group(self._store, 0, meeting.size, self.limit)
        self._group.check(self._calls.failure)
        if self._calls.wait(self.limit) or self._calls.failure():
            raise TransferFailed(self._calls.failure() or f"a worker has not answered for {self.limit:g} s")
        self.met = True

    def _expect(self, what: str, number: int) -> None:
        keys = [f"{what}/{number}/{rank}" for rank in range(1, len(self._calls.workers) + 1)]
        _wait(lambda: self._store.check(keys), self._calls.failure, self.limit)

    def through(self, named_tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The same tensors, of which workers get each bucket before it is passed on. All of them are read, also where
        the transfer fails, as other ranks read them too."""
        sending: deque[Any] = deque()
        sums: list[T] = []
        try:
            for index, (tensors, size) in enumerate(cut(named_tensors, self.bucket_bytes)):
                if self.failure is None:
                    self._try(self._send, index, tensors, size, sending, sums)
                yield from ((name, tensor) for name, tensor, _ in tensors)
        except BaseException:
            self._give_up("the trainer did not read all of its weights")
            raise
        if self.failure is None:
            self._try(self._end, sending, sums)

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            with failing():
                act(*arguments)
        except TransferFailed as error:
            self._give_up(str(error))

    def _send(self, index: int, tensors: list[tuple[str, T, int]], size: int, sending: deque, sums: list[T]) -> None:
        while len(sending) > 1:
            self._group.finish(sending.popleft()[1], self._calls.failure)
        buffer = self._group.buffer(size)
        layout = []
        for name, tensor, start in tensors:
            part = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor.detach())
            layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start, tensor.nbytes])
        sums.append(checksum(tensors[_sampled(self.number, index, len(tensors))][1]).to(self._group.device))
        self._announce(index, {"bytes": size, "tensors": layout})
        sending.append((buffer, self._group.broadcast(buffer)))

    def _end(self, sending: deque, sums: list[T]) -> None:
        found = torch.stack(sums).tolist() if sums else []
        self._announce(len(sums), {"sums": found})
        while sending:
            self._group.finish(sending.popleft()[1], self._calls.failure)

    def _announce(self, index: int, told: dict[str, Any]) -> None:
        self._store.set(f"bucket/{self.number}/{index}", json.dumps(told))

    def finish(self) -> bool:
        """Whether every worker has taken the version over."""
        if self.failure is None:
            self._calls.wait()
            if self._calls.failure() is not None:
                self._give_up(self._calls.failure())
        self._told()
        return self.failure is None

    def _give_up(self, reason: str) -> None:
        """Tell the workers, part from them, and start again those that were at it and do not answer."""
        self.failure = reason
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set("off", reason)
        self.close()
        if self._calls is None:
            return
        silent = self._calls.wait(GRACE_SECONDS)
        said = self._calls.failure()
        for rank, worker in silent.items():
            with suppress(RuntimeError):
                if self._store.check([f"ready/{self.number}/{rank}"]):
                    worker.end()
                    said = f"worker {worker.name} does not answer"
        if said is not None and reason not in said:
            self.failure = f"{said} ({reason})"

    def _told(self, counted: bool = True) -> None:
        """Count a failure, and say what follows of it."""
        if self.failure is None:
            self.failures = 0
            return
        said = f"weights did not go from device to device ({self.failure})"
        if not self.met and self.required:
            raise RolloutError(f"{said}: use weight_transfer host, or auto")
        self.failures = self.failures + counted if self.met else MOST_FAILURES
        later = "also all later ones" if self.failures >= MOST_FAILURES else "the next ones are tried anew"
        logger.warning("%s: this version goes through host memory, %s", said, later)

    def close(self) -> None:
        """Let go of the workers."""
        if self._group is not None:
            self._group.close()
        self._group = None


class WeightReceiver:
    """A worker's side. Raises TransferFailed where it cannot join or a version does not come through."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.limit = rank, meeting.limit
        with failing():
            timeout = timedelta(seconds=meeting.limit)
            self._store = dist.TCPStore(meeting.address, meeting.port, wait_for_workers=False, timeout=timeout)
            self._store.set(f"joined/0/{rank}", "")
            self._until("go")
            self._group = Group(self._store, rank, meeting.size, meeting.limit)
            self._group.check(self._stopped)

    def _stopped(self) -> str | None:
        """What the trainer says where it has given up."""
        return self._store.get("off").decode() if self._store.check(["off"]) else None

    def _until(self, key: str) -> None:
        _wait(lambda: self._store.check([key]), self._stopped, self.limit)

    def receive(self, number: int) -> Iterator[tuple[str, T]]:
        """(name, tensor) of a version as they come; it waits for the first of them. Then `check`."""
        with failing():
            self._store.set(f"ready/{number}/{self.rank}", "")
            first = self._announced(number, 0)
        self._number, self._sums, self._wanted = number, [], None
        return self._received(first)

    def _announced(self, number: int, index: int) -> dict[str, Any]:
        self._until(f"bucket/{number}/{index}")
        return json.loads(self._store.get(f"bucket/{number}/{index}"))

    def _received(self, told: dict[str, Any]) -> Iterator[tuple[str, T]]:
        coming: deque[tuple[dict[str, Any], T, Any]] = deque()
        index = 0
        while "sums" not in told:
            buffer = self._group.buffer(told["bytes"])
            coming.append((told, buffer, self._group.broadcast(buffer)))
            if len(coming) > 1:
                yield from self._arrived(*coming.popleft())
            index += 1
            with failing():
                told = self._announced(self._number, index)
        while coming:
            yield from self._arrived(*coming.popleft())
        self._wanted = told["sums"]

    def _arrived(self, told: dict[str, Any], buffer: T, work: Any) -> Iterator[tuple[str, T]]:
        self._group.finish(work, self._stopped)
        found = [
            (name, buffer[start : start + size].view(getattr(torch, dtype)).view(shape))
            for name, dtype, shape, start, size in told["tensors"]
        ]
        name, tensor = found[_sampled(self._number, len(self._sums), len(found))]
        self._sums.append(checksum(tensor))
        yield from found

    def check(self) -> None:
        """After the last tensor: raises WeightsRefused where a sampled one is not what was sent."""
        if self._wanted is None:
            raise TransferFailed(f"the engine did not read all of weight version {self._number}")
        found = torch.stack(self._sums).tolist() if self._sums else []
        wrong = [index for index, (own, wanted) in enumerate(zip(found, self._wanted)) if own != wanted]
        if wrong or len(found) != len(self._wanted):
            raise WeightsRefused(
                f"weight version {self._number} was damaged on its way from device to device, in {len(wrong)} of "
                f"{len(self._wanted)} buckets that were looked at"
            )

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def check_transfer(config: Any, devices: int) -> None:
    """Raise ConfigError where weights of a run are to go from device to device and cannot. devices: of each worker."""
    reason = _hindrance(config, devices)
    if config.distributed.resources.weight_transfer == "device" and reason is not None:
        raise ConfigError(f"weight_transfer device: {reason}; use weight_transfer host, or auto")


def _hindrance(config: Any, devices: int) -> str | None:
    """Why weights cannot go from device to device."""
    if devices > 1:
        return f"a worker of engine_tp_size {devices} hands its weights on to processes of vLLM"
    if config.asynchronous.ahead:
        return "with async.max_staleness workers take weights over at different times"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0":
        return "with VLLM_BATCH_INVARIANT the workers' NCCL has other settings than the trainer's"
    if get_accelerator().device_name() != "cpu" and not over_cards():
        return f"devices of {get_accelerator().device_name()} are not connected by NCCL"
    return None


def by_device(config: Any, devices: int) -> bool:
    """Whether weights go from device to device; as `check_transfer`."""
    asked = config.distributed.resources.weight_transfer
    return asked == "device" or (asked == AUTO and over_cards() and _hindrance(config, devices) is None)
