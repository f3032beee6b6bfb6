"""Ends a rank when another one is gone, stopped or has failed, instead of waiting for it in a collective for ever.

Every rank holds one connection to rank 0, which passes on what it learns. The system closes a connection when a process
ends, however it ends, and when a host is silent for SILENCE seconds. Both ends say now and then what they are doing.
The thread that does so runs as long as the process can, so a long stage is never mistaken for a stall; a stopped
process says nothing more. A rank that ends with an error says so first. What hangs while its process runs (a reward
server, say) is caught by the time limit of the collective that the other ranks wait in. Where they wait for however
long (`collectives.meet`), it is named in a warning alone.
"""

import atexit
import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from . import collectives
from .phase_timer import PhaseTimer
from .start_up import say_last

logger = logging.getLogger(__name__)

STARTING, BETWEEN = "start-up", "between phases"
LONGEST_PAUSE = 5.0  # seconds between two words of a rank
LONGEST_FAREWELL = 20.0  # seconds that a request to the store under way at the end of a run is waited for
LOSS_KNOWN = 3.0  # seconds in which all ranks hear of one that is gone
GREETING_LIMIT = 10.0  # seconds that connecting, and saying who one is, may take
IDLE, INTERVAL, PROBES = 10, 5, 5  # the system's keep-alive of a connection
SILENCE = IDLE + INTERVAL * PROBES
POLL = 0.2  # seconds between two looks at whether the watch is over
STAGE, LEFT, FAILED, END = "stage", "left", "failed", "end"  # what a rank says; END: from rank 0, why all must end
CHUNK = 2**16  # bytes that are read at once


@dataclass
class Heard:
    """When another rank last said something, its stage then, and whether it has left in order."""

    at: float
    stage: str = STARTING
    left: bool = False


@dataclass
class Watchdog:
    """One rank's watch over those that it is connected with: rank 0's over all others, that of the others over rank 0.

    limit: seconds of silence after which a rank counts as stopped. end: called with a message when this rank must end.
    complete: set once this rank is connected, on rank 0 once all others are.
    """

    rank: int
    world_size: int
    limit: float
    end: Callable[[str], None]
    timer: PhaseTimer | None = None  # of the loop, once there is one
    clock: Callable[[], float] = time.monotonic
    complete: threading.Event = field(default_factory=threading.Event)
    _heard: dict[int, Heard] = field(default_factory=dict)
    _connections: dict[socket.socket, bytes] = field(default_factory=dict)  # and what has come of their next lines
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _judged: float = 0.0
    _failing: bool = False
    _losing: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)  # no rank is judged any more
    _over: threading.Event = field(default_factory=threading.Event)  # the threads end
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def pause(self) -> float:
        """Seconds between two words of this rank."""
        return min(LONGEST_PAUSE, self.limit / 10)

    @property
    def stage(self) -> str:
        """What this rank is doing, or where it failed."""
        if self.timer is None:
            return STARTING
        return self.timer.failed_in or self.timer.current or BETWEEN

    def start(self, connect: Callable[[], dist.Store], key: str, address: str) -> None:
        """Begin to watch, in threads that end with the process.

        Waits until the ranks are connected, so that none can be gone unnoticed, but not for ever.

        Args:
            connect: to a store in which rank 0 says where it listens.
            key: under which it says so.
            address: of rank 0's host.
        """
        os.register_at_fork(after_in_child=self._close)  # else a forked child would stand for its parent
        for target in (partial(self._listen, connect, key, address), self._repeat):
            self._threads.append(threading.Thread(target=target, name="watchdog", daemon=True))
            self._threads[-1].start()
        self.complete.wait(GREETING_LIMIT)

    def stop(self) -> None:
        """End the watch and its threads, as others need not hear of this rank's end; for the orderly end of a run.

        Python aborts the process ("terminate called") when it ends with a thread inside torch's store.
        """
        self._stopped.set()
        self.say(LEFT)  # before the thread, which closes the connections at its end
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=LONGEST_FAREWELL)

    def report_failure(self, text: str) -> None:
        """Tell the other ranks why this one ends. The caller ends the process afterwards. Takes seconds on rank 0."""
        if self._failing:
            return
        self._failing = True
        self._stopped.set()
        if self.rank:
            self.say(FAILED, text)
        elif self._connections:
            self.say(END, f"rank 0 {FAILED}: {text}")
            time.sleep(LOSS_KNOWN)  # a launcher ends all ranks once one has ended: let the others say it too

    def give_way(self) -> None:
        """Where the loss of another rank may be behind this one's error, let the watch name it and end this process."""
        if self.world_size > 1 and self._losing.wait(LOSS_KNOWN):
            time.sleep(2 * LONGEST_PAUSE)  # in which the process ends

    def say(self, kind: str, text: str = "") -> None:
        """One line to whoever is at the other end of this rank's connections."""
        with self._sending:
            for each in list(self._connections):
                with contextlib.suppress(OSError):  # that one has left, or is gone, which its own connection tells
                    each.sendall(json.dumps([kind, text]).encode() + b"\n")

    def judge(self) -> None:
        """End this rank when another one has been silent for too long."""
        now = self.clock()
        if self._judged and now - self._judged > self.limit / 2:
            for last in list(self._heard.values()):
                last.at = now  # this rank itself was asleep: the others may have been well all the time
        self._judged = now
        for other, last in list(self._heard.items()):
            if now - last.at > self.limit and not last.left:
                self._end(
                    f"rank {other} has given no sign of life for {now - last.at:.0f} s (collective_timeout "
                    f"{self.limit:g}); its last stage: {last.stage}"
                )
                return

    def _repeat(self) -> None:
        """In a thread. A request to a store on a stopped process may hold the other one for ever."""
        while not self._over.wait(self.pause):
            self.say(STAGE, self.stage)
            self.judge()

    def _listen(self, connect: Callable[[], dist.Store], key: str, address: str) -> None:
        """In a thread: hold the connections by which ranks notice when others are gone."""
        try:
            with contextlib.ExitStack() as held:
                (self._join if self.rank else partial(self._serve, held))(connect(), key, address)
                while not self._over.is_set():
                    self.look(POLL)
        except (OSError, RuntimeError) as error:
            if not self._stopped.is_set():
                logger.warning("a rank that is gone is noticed after collective_timeout only: %s", error)
        finally:
            self._close()
            self._selector.close()

    def look(self, limit: float) -> None:
        """Read what has come, or comes within so many seconds."""
        for ready, _ in self._selector.select(limit):
            ready.data()

    def _serve(self, held: contextlib.ExitStack, store: dist.Store, key: str, address: str) -> None:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        server = held.enter_context(socket.create_server(("", 0), family=family, backlog=self.world_size))
        server.settimeout(POLL)
        password = secrets.token_hex(16)
        self._selector.register(server, selectors.EVENT_READ, partial(self._welcome, server, password))
        store.set(key, json.dumps([server.getsockname()[1], password]))

    def _welcome(self, server: socket.socket, password: str) -> None:
        try:
            connection, _ = server.accept()
        except OSError:  # who asked is gone again
            return
        connection.settimeout(GREETING_LIMIT)
        try:  # without a buffer, in which what stands behind the greeting would be lost
            said = json.loads(connection.makefile("rb", buffering=0).readline())
        except (OSError, ValueError):
            said = None
        if not isinstance(said, list) or said[:1] != [password] or len(said) != 2:
            connection.close()  # a stranger
            return
        self.keep(connection, int(said[1]))
        if len(self._connections) == self.world_size - 1:
            self.complete.set()

    def _join(self, store: dist.Store, key: str, address: str) -> None:
        while not store.check([key]):
            if self._over.wait(POLL):
                return
        port, password = json.loads(store.get(key))
        connection = socket.create_connection((address, port), timeout=GREETING_LIMIT)
        connection.sendall(json.dumps([password, self.rank]).encode() + b"\n")
        self.keep(connection, 0)
        self.complete.set()

    def keep(self, connection: socket.socket, other: int) -> None:
        """Hold the connection to another rank."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        limits = {socket.TCP_KEEPIDLE: IDLE, socket.TCP_KEEPINTVL: INTERVAL, socket.TCP_KEEPCNT: PROBES}
        limits[socket.TCP_USER_TIMEOUT] = SILENCE * 1000  # for words without an answer, during which nothing is probed
        for option, value in limits.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._heard[other] = Heard(self.clock())
        self._connections[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, connection, other))

    def _hear(self, connection: socket.socket, other: int) -> None:
        try:
            came = connection.recv(CHUNK)
        except OSError:  # its host is silent
            came = b""
        *lines, self._connections[connection] = (self._connections[connection] + came).split(b"\n")
        for line in lines:
            self._note(other, *json.loads(line))
        if came:
            return
        self._selector.unregister(connection)
        del self._connections[connection]
        connection.close()
        if not self._heard[other].left:
            self._end(f"rank {other} is gone: its process has ended or its host is silent")

    def _note(self, other: int, kind: str, text: str) -> None:
        heard = self._heard[other]
        heard.at = self.clock()
        if kind == STAGE:
            heard.stage = text
        elif kind == LEFT:
            heard.left = True
        elif kind == FAILED:
            self._end(f"rank {other} {FAILED}: {text}")
        elif kind == END:
            self._end(text)

    def _close(self) -> None:
        for each in list(self._connections):
            each.close()
        self._connections.clear()

    def _end(self, why: str) -> None:
        self._losing.set()
        if self._failing or self._stopped.is_set():
            return
        self.say(*((LEFT,) if self.rank else (END, why)))  # it is not this rank that the others are to name
        self.end(f"{why}; rank {self.rank} ends in stage: {self.stage}")


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
    _current = watch = Watchdog(collectives.rank(), collectives.world_size(), limit, end_process)
    if watch.world_size == 1:
        return watch

    def connect() -> dist.Store:
        """A connection of the watch's own: another thread may wait in the group's."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=max(1.0, watch.pause))
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)

    # The store outlives runs of one process, and torchrun's the processes.
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{_starts}"
    watch.start(connect, f"lightrft_visual/presence/{attempt}", os.environ["MASTER_ADDR"])
    atexit.register(stop)
    return watch


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
