"""Ends a rank when another one is gone, stopped or has failed, instead of waiting for it in a collective for ever.

A rank whose process has ended before the run is noticed by its connection (`presence`), within a minute at most.
Every rank's thread writes a heartbeat into the process group's store and reads the others'. The thread beats as long as
the process can run, so a long stage is never mistaken for a stall; a stopped process beats no more. A rank
that ends with an error says so in the store, and the others end at once. What hangs while its process runs (a reward
server, say) is caught by the time limit of the collective that the other ranks wait in.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import collectives
from .phase_timer import PhaseTimer
from .presence import GREETING_LIMIT, Presence, Store
from .start_up import say_last

logger = logging.getLogger(__name__)

STARTING, BETWEEN = "start-up", "between phases"
LONGEST_PAUSE = 5.0  # seconds between heartbeats
LONGEST_FAREWELL = 20.0  # seconds that a request to the store under way at the end of a run is waited for
LOSS_KNOWN = 3.0  # seconds in which all ranks hear of one that is gone
FAILED = "failed: "
KEYS = "lightrft_visual"  # before all keys in the store


@dataclass
class LastSeen:
    """The last heartbeat of a rank and when this rank first saw it."""

    at: float
    beat: str = ""
    stage: str = STARTING


@dataclass
class Watchdog:
    """One rank's watch over the others.

    connect: opens a connection of its own to the store (another thread may wait in the group's own). limit: seconds
    without a heartbeat after which a rank counts as stopped. end: called with a message when this rank must end.
    """

    connect: Callable[[], Store]
    rank: int
    world_size: int
    limit: float
    end: Callable[[str], None]
    timer: PhaseTimer | None = None  # of the loop, once there is one
    clock: Callable[[], float] = time.monotonic
    _store: Any = None
    _beats: int = 0
    _judged: float = 0.0
    _failing: bool = False
    _presence: Presence | None = None
    _losing: threading.Event = field(default_factory=threading.Event)
    _seen: dict[int, LastSeen] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def pause(self) -> float:
        """Seconds between two heartbeats."""
        return min(LONGEST_PAUSE, self.limit / 10)

    def start(self, address: str) -> None:
        """Begin to beat and to watch, in threads that end with the process. address: of rank 0's host.

        Waits until the ranks are connected, so that none can be gone unnoticed, but not for ever.
        """
        self._presence = Presence(self.rank, self.world_size, self.lost)
        # Beats and judgements apart: a store on a stopped process lets a request wait for ever.
        work = [lambda: self._repeat(self.beat), lambda: self._repeat(self.judge), lambda: self._accompany(address)]
        for target in work:
            thread = threading.Thread(target=target, name="watchdog", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._presence.complete.wait(GREETING_LIMIT)

    def stop(self) -> None:
        """End the watch and its threads; for the orderly end of a run.

        Python aborts the process ("terminate called") when it ends with a thread inside torch's store.
        """
        self._stopped.set()
        if self._presence is not None:
            self._presence.leave()
        for thread in self._threads:
            thread.join(timeout=LONGEST_FAREWELL)

    def report_failure(self, text: str) -> None:
        """Tell the other ranks why this one ends. The caller ends the process afterwards. Takes seconds."""
        self._failing = True
        self._stopped.set()  # without waiting: a beat may hang, and the process ends by os._exit
        if self.world_size == 1:
            return
        # By a connection and a thread of its own: a beat may hang in the other one.
        sender = threading.Thread(target=self._send_failure, args=(text,), daemon=True)
        sender.start()
        sender.join(timeout=2 * self.pause)
        if self.rank == 0:
            time.sleep(2 * self.pause)  # the store lives in this process: let the others read it

    def _send_failure(self, text: str) -> None:
        try:
            self.connect().set(self._key(self.rank), FAILED + text)
        except RuntimeError as error:
            logger.warning("the other ranks could not be told of this failure: %s", error)

    @property
    def stage(self) -> str:
        """What this rank is doing, or where it failed."""
        if self.timer is None:
            return STARTING
        return self.timer.failed_in or self.timer.current or BETWEEN

    def _accompany(self, address: str) -> None:
        """Hold the connection by which the others notice when this rank is gone, and notice when they are."""
        try:
            self._presence.run(self.connect(), f"{KEYS}/presence/{attempt()}", address)
        except (OSError, RuntimeError) as error:
            if not self._stopped.is_set():
                logger.warning("a rank that is gone is noticed after collective_timeout only: %s", error)

    def lost(self, other: int, told: str) -> None:
        """End this rank, as the process of another one is gone. told: why, where rank 0 has said so."""
        self._losing.set()
        self._end(
            told or self._last_words(other) or f"rank {other} is gone: its process has ended or its host is silent"
        )

    def _last_words(self, other: int) -> str:
        try:
            store = self.connect()
            said = store.get(self._key(other)).decode() if store.check([self._key(other)]) else ""
        except RuntimeError:  # the store was with the rank that is gone
            return ""
        return f"rank {other} {said}" if said.startswith(FAILED) else ""

    def give_way(self) -> None:
        """Where the loss of another rank may be behind this one's error, let the watch name it and end this process."""
        if self.world_size > 1 and self._losing.wait(LOSS_KNOWN):
            time.sleep(2 * LONGEST_PAUSE)  # in which the process ends

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._stopped.wait(self.pause):
            action()

    def beat(self) -> None:
        """One heartbeat out, and a look for those of the other ranks."""
        try:
            if self._store is None:
                self._store = self.connect()
            self._beats += 1
            self._store.set(self._key(self.rank), f"{self._beats}|{self.stage}")
            for other in self._others():
                if self._store.check([self._key(other)]):
                    self._note(other, self._store.get(self._key(other)).decode())
        except RuntimeError:  # torch's errors of a store that is gone or slow: connect anew next time
            self._store = None

    def _note(self, other: int, content: str) -> None:
        if content.startswith(FAILED):
            self._end(f"rank {other} {content}")
            return
        beat, _, stage = content.partition("|")
        if other not in self._seen or self._seen[other].beat != beat:
            self._seen[other] = LastSeen(self.clock(), beat, stage)

    def judge(self) -> None:
        """End this rank when another one has been silent for too long."""
        now = self.clock()
        if self._judged and now - self._judged > self.limit / 2:
            self._seen.clear()  # this rank itself was asleep: the others may have been well all the time
        self._judged = now
        for other in self._others():
            last = self._seen.setdefault(other, LastSeen(now))
            if now - last.at > self.limit:
                self._end(
                    f"rank {other} has given no sign of life for {now - last.at:.0f} s (collective_timeout "
                    f"{self.limit:g}); its last stage: {last.stage}"
                )
                return

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _key(self, rank: int) -> str:
        return f"{KEYS}/heartbeat/{attempt()}/{rank}"

    def _end(self, why: str) -> None:
        if self._failing or self._stopped.is_set():
            return
        if self._presence is not None and self.rank == 0:
            self._presence.pass_on(why)
        elif self._presence is not None:
            self._presence.leave()  # it is not this rank that the others are to name
        self.end(f"{why}; rank {self.rank} ends in stage: {self.stage}")


def attempt() -> str:
    """Which watch of these ranks this is: the store outlives runs of one process, and torchrun's the processes."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{_starts}"


def end_process(message: str) -> None:
    """Say why on stderr and end at once: the main thread may be inside a collective that never returns."""
    say_last(f"error: {message}")
    os._exit(1)


# The process group is one per process, and so is the watch over it.
_current: Watchdog | None = None
_starts = 0


def start(limit: float) -> Watchdog:
    """Watch over the ranks of the process group that the environment describes; idle for a single rank."""
    global _current, _starts
    stop()
    _starts += 1

    def connect() -> Store:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, _current.pause)),
        )

    _current = Watchdog(connect, collectives.rank(), collectives.world_size(), limit, end_process)
    if _current.world_size > 1:
        _current.start(os.environ["MASTER_ADDR"])
        atexit.register(stop)
    return _current


def follow(timer: PhaseTimer) -> None:
    """Name stages by this timer from now on."""
    if _current is not None:
        _current.timer = timer


def stage() -> str:
    """What this rank is doing, or where it failed."""
    return _current.stage if _current is not None else STARTING


def report_failure(text: str) -> None:
    """Let the other ranks know that this one ends, and why; the caller then ends the process."""
    if _current is not None:
        _current.report_failure(text)


def give_way() -> None:
    """Before an error is told as this rank's own: end this process by naming the rank that is gone, if one is."""
    if _current is not None:
        _current.give_way()


def stop() -> None:
    """No more watching: the run has come to an orderly end."""
    if _current is not None:
        _current.stop()
