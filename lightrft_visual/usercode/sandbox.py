"""A callable in a process of its own, with a time limit that nothing it does can outlast.

Arguments go to the child by pickle over a socket pair of theirs; answers come back as JSON only. A call that runs over
its limit, or a child that ends, costs that call: the child is killed and the next call gets a fresh one. This bounds
time. It is no jail: the function runs with the user's own rights.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RewardError
from .calls import Elsewhere, describe_error, invoke, masked, place_now
from .failures import Failed, ScoringFailed
from .loading import LoadedFunction, load_reward_fn

START_SECONDS = 120.0  # importing the function's module does not count against a call
TOLD_AT = 0.5  # share of the limit after which the child says where it is
ORPHAN_SECONDS = 5.0  # a child whose parent died ends itself this long after its limit (default action of SIGALRM)


class CallTimeout(Exception):
    """The call ran over its limit, or its process ended without an answer; the text says which."""


class Worker:
    """A child process that loads `spec` once and answers calls. spec: `path.py:name` or `package.module:name`."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The function's result as JSON values. Raises CallTimeout after `seconds`, and RewardError with the message
        and lines of what the function raised."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask(pickle.dumps((seconds, dict(arguments))), seconds)
        if "error" in answer:
            raise RewardError(f"reward function {self.spec.rpartition(':')[2]} {masked(answer['error'])}")
        return answer["result"]

    def _start(self) -> None:
        self.close()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-m", __name__, self.spec, str(theirs.fileno())]
        with theirs:  # what the function prints goes to stderr
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()]
            )
        self._pipe = Connection(os.dup(self._socket.fileno()))
        try:
            ready = self._ask(None, START_SECONDS)
        except CallTimeout as late:
            raise RewardError(f"the process of reward function {self.spec} did not start: {late}") from None
        if "error" in ready:
            self.close()
            raise ConfigError(f"reward function {self.spec} cannot be loaded: {masked(ready['error'])}")

    def _ask(self, request: bytes | None, seconds: float) -> dict[str, Any]:
        """The answer, to the start of the process or to a request. Raises CallTimeout."""
        late, place = threading.Event(), ""
        timer = threading.Timer(seconds, self._give_up, [late])
        timer.daemon = True
        timer.start()
        try:
            if request is not None:
                self._pipe.send_bytes(request)
            while "place" in (answer := json.loads(self._pipe.recv_bytes())):
                place = answer["place"]
            return answer
        except (EOFError, OSError):
            why = (
                f"no result within {seconds:g} s{place}"
                if late.is_set()
                else f"its process died{self._exit_code()}{place}"
            )
            late.set()
            raise CallTimeout(why) from None
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self.close()

    def _exit_code(self) -> str:
        try:
            return f" (exit code {self._process.wait(timeout=1)})"
        except subprocess.TimeoutExpired:
            return ""

    def _give_up(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()
        self._socket.shutdown(socket.SHUT_RDWR)  # a grandchild may hold the other end

    def close(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._socket.close()
            self._process = None


class SandboxedCallable(Elsewhere):
    """A user function, loaded by path, that runs in a Worker; a call over the limit makes its samples invalid."""

    def __init__(self, loaded: LoadedFunction, seconds: float) -> None:
        self.__signature__ = inspect.signature(loaded)
        if not set(self.__signature__.parameters) - {"device"}:
            raise ConfigError(f"reward_fn_timeout cannot run {loaded.spec}, which makes its scorer at the start")
        self.function, self.seconds = loaded.function, seconds
        path, _, name = loaded.spec.rpartition(":")
        self._worker = Worker(f"{Path(path).expanduser().resolve()}:{name}")

    def invoke(self, arguments: Mapping[str, Any]) -> Any:
        """One call, or one for each of ROWS, in the process. Raises ScoringFailed when there is no answer."""
        try:
            return from_json(self._worker.call(arguments, self.seconds))
        except CallTimeout as late:
            raise ScoringFailed(str(late)) from None

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def from_json(value: Any) -> Any:
    """Undo the marks of `to_json`."""
    if isinstance(value, list):
        return [from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["tuple"]:
        return tuple(from_json(entry) for entry in value["tuple"])
    return Failed(value["failed"]) if list(value) == ["failed"] else {k: from_json(v) for k, v in value.items()}


def to_json(value: Any) -> Any:
    """JSON values of a result: tensors and arrays become lists, tuples and Failed marked objects."""
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [to_json(entry) for entry in value]}
    if isinstance(value, list):
        return [to_json(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Failed):
        return {"failed": value.reason}
    if type(value).__module__.partition(".")[0] in ("torch", "numpy"):
        return (value.detach().cpu() if type(value).__module__ == "torch" else value).tolist()
    raise TypeError(f"a {type(value).__name__} cannot leave the reward process")


def _load(spec: str) -> Callable[..., Any]:
    path, _, name = spec.rpartition(":")
    function = load_reward_fn(spec).function if path.endswith(".py") else vars(import_module(path))[name]
    if "model_reward_list" in inspect.signature(function).parameters:
        import_module("torch")  # its tensors; the import must not count against the first call
    return function


def _answer(function: Callable[..., Any], payload: bytes, send: Callable[[Any], None]) -> dict[str, Any]:
    try:
        seconds, arguments = pickle.loads(payload)  # from the parent process, over its own pipe
        signal.setitimer(signal.ITIMER_REAL, seconds + ORPHAN_SECONDS)
        with _place_told(TOLD_AT * seconds, send):
            return {"result": to_json(invoke(function, arguments))}
    except BaseException as error:
        return {"error": describe_error(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _place_told(seconds: float, send: Callable[[Any], None]) -> Iterator[None]:
    """Send where this thread is when it is still inside after `seconds`."""
    owner = threading.get_ident()
    timer = threading.Timer(seconds, lambda: send({"place": place_now(owner)}))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _serve(spec: str, pipe: Connection) -> None:
    """The child: load, say so, answer until the parent closes its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers signal every process; this one ends with its parent
    try:
        function = _load(spec)
    except Exception as error:
        told = str(error) if isinstance(error, ConfigError) else describe_error(error)
        pipe.send_bytes(json.dumps({"error": told}).encode())
        return
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send_bytes(json.dumps(message).encode())

    answer: dict[str, Any] = {}
    while True:
        send(answer)
        try:
            answer = _answer(function, pipe.recv_bytes(), send)
        except EOFError:
            return


if __name__ == "__main__":
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
