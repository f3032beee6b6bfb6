"""Tells which rank's process is gone, by connections that the system closes when a process ends, however it ends.

Every rank holds one connection to rank 0, which passes on what it learns. A process that is killed loses its connection
at once, a host that falls silent within SILENCE seconds. A process that is merely busy, or stopped, keeps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

import psutil

GREETING_LIMIT = 10.0  # seconds that connecting, and saying who one is, may take
IDLE, INTERVAL, PROBES = 10, 5, 5  # the system's keep-alive of a connection
SILENCE = IDLE + INTERVAL * PROBES
POLL = 0.2  # seconds between two looks at whether the watch is over
LEAVING = b"leaving"


class Store(Protocol):
    """What the ranks need of torch's TCPStore to find each other."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...


class Presence:
    """One rank's end of the connections; `run` is for a thread of its own.

    complete: set once this rank is connected, on rank 0 once all others are. told: called with the rank that is
    gone and '', or on ranks other than 0 with what rank 0 says before it ends.
    """

    def __init__(self, rank: int, world_size: int, told: Callable[[int, str], None]):
        self.rank, self.world_size, self.told = rank, world_size, told
        self.complete, self._leaves, self._over = threading.Event(), threading.Event(), threading.Event()
        self._sockets: set[socket.socket] = set()
        os.register_at_fork(after_in_child=self._close)  # else a forked child would stand for its parent

    def run(self, store: Store, key: str, address: str) -> None:
        """Watch until `leave`. Raises OSError or RuntimeError where rank 0 cannot be reached, or the store."""
        try:
            if self.rank == 0:
                self._serve(store, key, address)
            else:
                self._follow(store, key, address)
        finally:
            self._close()

    def leave(self) -> None:
        """Say that this rank's end is none that the others need to hear of, and end `run`."""
        self._leaves.set()
        self.send(LEAVING)  # before the thread, which closes the connections at its end
        self._over.set()
        for each in self._sockets.copy():
            with contextlib.suppress(OSError):  # the other end was faster
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    def pass_on(self, why: str) -> None:
        """From rank 0: tell all other ranks why they must end."""
        self.send(json.dumps(why).encode())

    def send(self, message: bytes) -> None:
        """One line to whoever is at the other end of this rank's connections."""
        for each in self._sockets.copy():
            with contextlib.suppress(OSError):  # that one has left, or is gone, which its own connection tells
                each.sendall(message + b"\n")

    def _keep(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", INTERVAL), ("TCP_KEEPCNT", PROBES)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sockets.add(connection)

    def _close(self) -> None:
        for each in self._sockets.copy():
            each.close()
        self._sockets.clear()

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _serve(self, store: Store, key: str, address: str) -> None:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        password = secrets.token_hex(16)
        with socket.create_server(("", 0), family=family, backlog=self.world_size) as server:
            server.settimeout(POLL)
            store.set(key, json.dumps([server.getsockname()[1], password]))
            with selectors.DefaultSelector() as selector:
                selector.register(server, selectors.EVENT_READ)
                while not self._over.is_set():
                    for ready, _ in selector.select(POLL):
                        if ready.fileobj is server:
                            self._welcome(server, password, selector)
                        else:
                            self._hear(ready.fileobj, ready.data, selector)

    def _welcome(self, server: socket.socket, password: str, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = server.accept()
        except OSError:  # who asked is gone again
            return
        connection.settimeout(GREETING_LIMIT)
        try:
            said = json.loads(read_line(connection))
        except (OSError, ValueError):
            said = None
        if not isinstance(said, list) or said[:1] != [password] or len(said) != 2:
            connection.close()  # a stranger
            return
        self._keep(connection)
        selector.register(connection, selectors.EVENT_READ, int(said[1]))
        if len(self._sockets) == self.world_size - 1:
            self.complete.set()

    def _hear(self, connection: socket.socket, other: int, selector: selectors.BaseSelector) -> None:
        try:
            line = read_line(connection)
        except OSError:
            line = b""
        selector.unregister(connection)
        self._sockets.discard(connection)
        connection.close()
        if line != LEAVING and not self._leaves.is_set():
            self.told(other, "")

    # -- the others --------------------------------------------------------------------------------------------------

    def _follow(self, store: Store, key: str, address: str) -> None:
        while not store.check([key]):
            if self._over.wait(POLL):
                return
        port, password = json.loads(store.get(key))
        connection = socket.create_connection((address, port), timeout=GREETING_LIMIT)
        connection.sendall(json.dumps([password, self.rank]).encode() + b"\n")
        connection.settimeout(None)
        self._keep(connection)
        self.complete.set()
        try:
            line = read_line(connection)
        except OSError:  # rank 0's host is silent
            line = b""
        if self._leaves.is_set() or line == LEAVING:
            return
        self.told(0, json.loads(line) if line else "")


def read_line(connection: socket.socket) -> bytes:
    """What comes until a line's end, without it; what there is where the connection ends before, b'' for nothing."""
    found = b""
    while not found.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return b"" if not found else found
        found += byte
    return found[:-1]


FRONTS = ("deepspeed", "ds", "deepspeed.launcher.runner")  # start one of the following and wait for it
STARTERS = ("deepspeed.launcher.launch", "torchrun", "torch.distributed.run", "torch.distributed.launch")
WITH_VALUE = ("-W", "-X")  # options of Python whose value may be the next word
STARTED_BY = "LIGHTRFT_STARTED_BY"  # environment variable: the process that a rank's launcher has put beside it


def program(command: Sequence[str]) -> str:
    """The module (`-m NAME`) or the file name that a Python command line runs; '' where there is none."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in WITH_VALUE:
            next(words, "")
        elif not word.startswith("-"):
            return Path(word).name
    return ""


class LauncherWatch:
    """The launchers above this process when it is made: what started it, and what started that; or the process that
    STARTED_BY names."""

    def __init__(self) -> None:
        self.launchers: list[psutil.Process] = []
        self._came_late = False
        if os.environ.get(STARTED_BY):
            try:
                self.launchers.append(psutil.Process(int(os.environ[STARTED_BY])))
            except psutil.NoSuchProcess:
                self._came_late = True
        process = psutil.Process().parent()
        while process is not None and _is_launcher(process):
            self.launchers.append(process)
            process = process.parent()

    def gone(self) -> bool:
        """Whether one of them has ended: nobody waits for this run any more, or can end it."""
        return self._came_late or not all(map(_runs, self.launchers))


def _is_launcher(process: psutil.Process) -> bool:
    try:
        return program(process.cmdline()) in FRONTS + STARTERS
    except psutil.Error:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def hangup_ends() -> Iterator[None]:
    """Inside, SIGHUP, by which a lost terminal is told, does what SIGTERM does. Ignored, as by nohup, it stays so."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        yield
        return
    with handled(signal.SIGHUP, _hang_up):
        yield


def _hang_up(*_: object) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):  # writing to a lost terminal is an error
            os.dup2(nowhere, output)
    os.close(nowhere)
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, a signal calls `handler`; the one that was set before comes back, also after an error.

    Only the main thread may set handlers: in another one nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    signal.signal(number, handler)
    try:
        yield
    finally:
        if before is not None:  # else it was set by C code, and Python cannot set it again
            signal.signal(number, before)
