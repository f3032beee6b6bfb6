"""Rollout workers behind one queue: work goes to whoever is free, and what a dead worker held is done by another."""

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....errors import RolloutError
from ....rollout.weight_sync import Posted
from .worker import LacksWeights

logger = logging.getLogger(__name__)
SHARES = 2  # pieces of a batch for each worker: whoever is done first takes more
MOST_DEATHS = 5  # of workers over one piece of work, which then is taken to be their cause
RETRY_SECONDS = 0.05  # between questions to a worker that waits for its weights
LOOK_SECONDS = 1.0  # between looks at an idle worker, which may have been started again


class WorkerDied(Exception):
    """The process of a worker is gone, or did not answer in time and was ended."""


class WorkerHandle(Protocol):
    """A worker as the pool sees it. `call` and `wait_until_back` raise WorkerDied; it starts again by itself."""

    name: str

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of `worker.Worker`, and what it returns or raises."""

    def end(self) -> None:
        """End its process, which starts again."""

    def wait_until_back(self) -> None:
        """Until a process that has died is there again, without weights. Raises RolloutError where it does not come."""


@dataclass(order=True)
class _Piece:
    """A piece of work in the queue, in the order in which it is done."""

    rank: int  # 0 before 1
    number: int
    arguments: tuple = field(compare=False)
    result: Future = field(compare=False)
    deaths: int = field(compare=False, default=0)


class WorkerPool:
    """Hands pieces of work to workers, one at a time to each, from one queue.

    holds_weights: whether this process posts the weights; another rank's pool waits until that one has given them to a
    worker that was started again. shared: whether there are other ranks, for whom this one then looks after that.
    copied: whether the present weights lie where such a worker can get them; else it waits for the next version.
    """

    def __init__(self, workers: Sequence[WorkerHandle], holds_weights: bool = True, shared: bool = False) -> None:
        self.workers, self.holds_weights = list(workers), holds_weights
        self.deaths = 0
        self.version, self.caches = 0, 0
        self.posted: Posted | None = None
        self.copied = True
        self._without: set[str] = set()  # workers that have not the present weights, nor can get them
        self._looks_after = shared and holds_weights
        self._looked: dict[str, tuple[int, float]] = {}  # by worker: the version that it had, when
        self._failure: BaseException | None = None
        self._working, self._spent = 0, 0.0
        self._since = self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._queue: queue.PriorityQueue[_Piece] = queue.PriorityQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"pool-{worker.name}", daemon=True)
            for worker in self.workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        """Workers to share work out among; 1 where none is left, whose end `submit` tells."""
        return max(1, len(self.workers))

    def pieces(self, count: int, whole: int = 1) -> list[slice]:
        """How `count` samples are shared out: in micro-batches of `whole` or several of them; to one worker at once."""
        batches = math.ceil(count / whole)
        each = whole * (batches if self.size == 1 else math.ceil(batches / (self.size * SHARES)))
        return [slice(start, start + each) for start in range(0, count, max(1, each))]

    def submit(self, *arguments: Any, urgent: bool = False) -> Future:
        """The future of what `Worker.run` returns, (what it made, version of its weights). urgent: before all else."""
        piece = _Piece(0 if urgent else 1, next(self._numbers), arguments, Future())
        if self._failure is not None:
            piece.result.set_exception(self._failure)
        else:
            self._put(piece)
        return piece.result

    def _put(self, piece: _Piece) -> None:
        self._queue.put(piece)
        if self._failure is not None:  # since the caller looked: nobody takes it any more
            self._fail(self._failure)

    def give_weights(self, version: int, posted: Posted | None, at_once: bool) -> None:
        """From now on work is begun with another version of the weights.

        Args:
            version: its number.
            posted: where it is, in the process that posts it; None in others, and where the host keeps no copy.
            at_once: all workers take it over now, at the same time, and what they raise is raised here; else each does
                before its next piece.
        """
        with self._lock:
            self.version, self.posted = version, posted
            self._without.clear()
        if not at_once or posted is None:
            return
        with ThreadPoolExecutor(self.size) as threads:
            for _ in threads.map(self._load, list(self.workers)):  # raises what the first one did
                pass

    def forget(self) -> None:
        """Workers forget what they computed of earlier prompts, before their next piece."""
        with self._lock:
            self.caches += 1

    def busy_share(self) -> float:
        """The share of the workers' time, since the last call, in which they had work."""
        with self._lock:
            self._count(0)
            now = time.perf_counter()
            share = self._spent / max(now - self._began, 1e-9) / self.size
            self._spent, self._began = 0.0, now
        return share

    def close(self) -> None:
        """No work is begun any more; what waits is cancelled. The workers are left to who started them."""
        self._fail(RolloutError("the pool of workers is closed"))

    def _count(self, change: int) -> None:
        """Workers at work: `change` more. Under the lock."""
        now = time.perf_counter()
        self._spent += self._working * (now - self._since)
        self._working, self._since = self._working + change, now

    def _load(self, worker: WorkerHandle) -> None:
        try:
            worker.call("load", self.posted)
        except WorkerDied:
            logger.warning("worker %s died while it was given weights; it gets them when it is back", worker.name)

    def _serve(self, worker: WorkerHandle) -> None:
        while self._failure is None:
            if worker.name in self._without:
                time.sleep(RETRY_SECONDS)
                continue
            try:
                piece = self._queue.get(timeout=RETRY_SECONDS if self._looks_after else LOOK_SECONDS)
            except queue.Empty:
                if self._looks_after and not self._looked_after(worker):
                    return
                continue
            with self._lock:
                self._count(1)
            died = self._work(worker, piece)
            with self._lock:
                self._count(-1)
            if died and not self._back(worker):
                return

    def _work(self, worker: WorkerHandle, piece: _Piece) -> bool:
        """Do a piece; whether the worker died over it."""
        while True:
            with self._lock:
                present = self.version, self.posted, self.caches
            try:
                made = worker.call("run", *present, piece.arguments)
            except LacksWeights as error:
                if self._passed_on(piece, worker):
                    return False
                if not self.holds_weights and self._failure is None:
                    time.sleep(RETRY_SECONDS)  # until the rank that posts them has seen to it
                    continue
                piece.result.set_exception(error)
            except WorkerDied as death:
                self._again(piece, worker, death)
                return True
            except BaseException as error:
                piece.result.set_exception(error)
            else:
                piece.result.set_result(made)
            return False

    def _passed_on(self, piece: _Piece, worker: WorkerHandle) -> bool:
        """Whether there is no copy of the present weights for this worker, so that the others do its work."""
        with self._lock:
            if self.copied or self._failure is not None:
                return False
            self._without.add(worker.name)
        self._put(piece)
        self._check_left(f"worker {worker.name} was started again")
        return True

    def _check_left(self, last: str) -> None:
        """All work fails where no worker has the present weights, or none is left. last: what happened to the last."""
        with self._lock:
            lost = all(worker.name in self._without for worker in self.workers)
        if lost and self.workers:
            said = "no rollout worker has the present weights, of which the trainer's host keeps no copy"
            self._fail(RolloutError(f"{said}; the last one: {last}. Go on from a checkpoint"))
        elif lost:
            self._fail(RolloutError(f"no rollout worker is left; the last one: {last}"))

    def _again(self, piece: _Piece, worker: WorkerHandle, death: WorkerDied) -> None:
        """Put back what a dead worker held, before what came later."""
        self.deaths += 1
        piece.deaths += 1
        if self._failure is not None:
            piece.result.set_exception(self._failure)
        elif piece.deaths >= MOST_DEATHS:
            piece.result.set_exception(
                RolloutError(
                    f"{piece.deaths} workers died over the same prompts, the last one ({worker.name}): {death}"
                )
            )
        else:
            logger.warning("rollout worker %s: %s; it is started again, what it held is done anew", worker.name, death)
            self._put(piece)

    def _back(self, worker: WorkerHandle) -> bool:
        """Whether a dead worker came back; where none is left, all work fails."""
        if self._failure is not None:
            return False
        try:
            worker.wait_until_back()
            return True
        except (RolloutError, WorkerDied) as error:
            if self._failure is not None:  # nobody waits for it any more
                return False
            with self._lock:
                self.workers.remove(worker)
            logger.warning("rollout worker %s does not come back: %s", worker.name, error)
            self._check_left(str(error))
            return False

    def _looked_after(self, worker: WorkerHandle) -> bool:
        """Give an idle worker new weights, and one that was started again the present ones: other ranks, which cannot,
        wait for them. False where it is gone."""
        with self._lock:
            version, posted = self.version, self.posted
        had, when = self._looked.get(worker.name, (0, 0.0))
        if posted is None or (had == version and time.monotonic() - when < LOOK_SECONDS):
            return True
        try:
            worker.call("load", posted)
            self._looked[worker.name] = version, time.monotonic()
            return True
        except WorkerDied:
            return self._back(worker)
        except Exception as error:  # such as a wrong checksum: nobody can go on with these weights
            self._fail(error)
            return False

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        while True:
            try:
                self._queue.get_nowait().result.set_exception(error)
            except queue.Empty:
                return
