"""Environments apart: every episode has a process of its own, which ends with it.

A process is copied (by fork) from one that has loaded the user's file already, in a few milliseconds. So nothing that
one episode does reaches another or the run, and a call that takes longer than `env_timeout` is ended for good, with all
that it has started. `environment_process` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import socket
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..config.environment import EpisodeConfig
from ..errors import ConfigError
from ..runtime.usercode.calls import masked
from ..runtime.usercode.sandbox import READY, START_SECONDS, Connection, NotAnAnswer, started
from .environment_process import CONTROL_BYTES, unpack
from .environments import Action, EnvironmentFailure, EnvironmentHost, Observation, StepResult

AT_ONCE = 256  # calls that wait for an answer beside each other; later ones begin when there is room
COPY_SECONDS = 30.0  # for a process to be copied
CLOSE_SECONDS = 5.0  # for an environment's close


def runs_apart(config: EpisodeConfig) -> bool:
    """Whether a process can load this environment by itself: it, or its tools, are named as path.py:name."""
    names = [config.environment or "tools", *(config.tools or "").split(",")]
    own = [name for name in names if name.strip() not in ("", "tools")]  # another that is registered may be a plug-in's
    return bool(own) and all(".py:" in name for name in own)


class ProcessHost(EnvironmentHost):
    """An `EnvironmentHost` with a process for each episode.

    Raises ConfigError where the environment cannot be loaded.
    """

    def __init__(self, config: EpisodeConfig) -> None:
        self.seconds = config.env_timeout
        self._config = {"environment": config.environment, "tools": config.tools}
        self._episodes: dict[int, _Episode] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="environment")
        self._copying = threading.Lock()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))  # a socket for each episode of a step
        self._start()

    def reset(self, episode: int, row: dict[str, Any]) -> Future[Observation | None]:
        def begin() -> Observation | None:
            self._episodes[episode] = made = self._copy()
            return made.call("reset", row, self.seconds)

        return self._threads.submit(begin)

    def step(self, episode: int, action: Action) -> Future[StepResult]:
        return self._threads.submit(self._episodes[episode].call, "step", action, self.seconds)

    def end(self, episode: int) -> None:
        if (made := self._episodes.pop(episode, None)) is not None:
            self._threads.submit(self._end, made)

    def close(self) -> None:
        """Waits for what environments do at their ends."""
        for episode in list(self._episodes):
            self.end(episode)
        self._threads.shutdown(wait=True)
        self._process.kill()
        self._process.wait()
        self._control.close()

    def _end(self, made: _Episode) -> None:
        with contextlib.suppress(EnvironmentFailure):
            if not made.broken:
                made.call("close", None, min(CLOSE_SECONDS, self.seconds))
        made.socket.close()
        with self._copying, contextlib.suppress(OSError):  # where that process is gone, its copies see it and end
            self._control.send(str(made.number).encode())

    # -- the process that is copied ----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "lightrft_visual.rollout.environment_process"
        self._process = started(module, json.dumps(self._config), theirs)
        try:
            ready = self._told(START_SECONDS)
        except OSError as error:
            self._process.kill()
            raise ConfigError(f"the process of the environment did not start: {error}") from None
        if READY not in ready:
            raise ConfigError(masked(ready["error"]))

    def _told(self, seconds: float) -> dict[str, Any]:
        """The next message of that process. Raises OSError."""
        self._control.settimeout(seconds)
        message = self._control.recv(CONTROL_BYTES)
        if not message:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
            self._process.kill()  # it may live without its end of the connection
            raise ConnectionError(f"it ended with exit code {self._process.wait()}")
        return json.loads(message)

    def _copy(self) -> _Episode:
        """A process for an episode. Starts anew what was ended by an environment that killed its parent."""
        with self._copying:
            for again in (True, False):
                try:
                    ours, theirs = socket.socketpair()
                except OSError as error:
                    told = f"no process for it: {error}; each episode takes an open file, see ulimit -n"
                    raise EnvironmentFailure(told) from None
                try:
                    with theirs:
                        socket.send_fds(self._control, [b"copy"], [theirs.fileno()])
                        return _Episode(ours, self._told(COPY_SECONDS)["copy"])
                except OSError as error:
                    ours.close()
                    if not again:
                        raise EnvironmentFailure(f"no process for it: {error}") from None
                    self._process.kill()
                    self._process.wait()
                    self._control.close()
                    self._start()
            raise AssertionError("one of two attempts returns or raises")


class _Episode(Connection):
    """This side of an episode's process. number: of the process. broken: a call failed, nothing more is to be asked."""

    def __init__(self, ours: socket.socket, number: int) -> None:
        super().__init__(ours)
        self.number, self.broken = number, False

    def call(self, what: str, given: Any, seconds: float) -> Any:
        """What the environment gave. Raises EnvironmentFailure."""
        try:
            payload = pickle.dumps((seconds, {"what": what, "given": given}))
        except Exception as error:  # such as a function in a column of the row
            raise EnvironmentFailure(f"{what}: what it is given cannot go to its process: {error}") from None
        try:
            answer = self.ask(payload, seconds)
            result = answer["result"] if "result" in answer else {"failure": answer["error"]}
            if "failure" in result:
                raise EnvironmentFailure(masked(result["failure"]))
            return unpack(result["done"])
        except TimeoutError:
            why = f"{what} took longer than env_timeout = {seconds:g} seconds{self.seen}"
        except OSError:
            why = f"{what}: its process ended{self.seen}"
        except (NotAnAnswer, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{what}: its process sent what is no answer ({type(error).__name__})"
        self.broken = True
        raise EnvironmentFailure(why)
