"""A callable in a process of its own, with a time limit that nothing it does can outlast.

Arguments go to the child by pickle over a pipe; answers come back as JSON only. A call that runs over its limit, or a
child that dies, costs that call: the child is killed and the next call gets a fresh one. This bounds time. It is no
jail: the function runs with the user's own rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import ConfigError, RewardError
from ..failures import Failed, ScoringFailed

START_SECONDS = 120.0  # importing the function's module does not count against a call
ORPHAN_SECONDS = 5.0  # a child whose parent died ends itself this long after its limit (default action of SIGALRM)
_HEADER = struct.Struct(">Q")


class CallTimeout(Exception):
    """The call ran over its limit, or its process ended without an answer; the text says which."""


class Worker:
    """A child process that loads `spec` once and answers calls. spec: `path.py:name` or `package.module:name`."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The function's result as JSON values. Raises CallTimeout after `seconds`, and RewardError with the type and
        place of what the function raised, without its message, which may quote its arguments."""
        self._ensure_started()
        deadline = time.monotonic() + seconds
        try:
            _send(self._process.stdin, pickle.dumps((seconds, dict(arguments))), deadline)
            answer = json.loads(self._receive(deadline))
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            late = isinstance(error, TimeoutError)
            raise CallTimeout(f"no result within {seconds:g} s" if late else "its process died") from None
        if "error" in answer:
            raise RewardError(f"reward function {self.spec} raised {answer['error']}")
        return answer["result"]

    def _ensure_started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightrft_visual.rewards.local.sandbox", self.spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            ready = json.loads(self._receive(time.monotonic() + START_SECONDS))
        except (TimeoutError, EOFError):
            self.close()
            raise RewardError(f"the process of reward function {self.spec} did not start") from None
        if "error" in ready:
            self.close()
            raise ConfigError(f"reward function {self.spec} cannot be loaded: {ready['error']}")

    def _receive(self, deadline: float) -> bytes:
        (length,) = _HEADER.unpack(_read_exactly(self._process.stdout, _HEADER.size, deadline))
        return _read_exactly(self._process.stdout, length, deadline)

    def close(self) -> None:
        """End the child at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def _send(pipe: BinaryIO, payload: bytes, deadline: float) -> None:
    data = memoryview(_HEADER.pack(len(payload)) + payload)
    while data:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([], [pipe], [], left)[1]:
            raise TimeoutError
        data = data[os.write(pipe.fileno(), data[:65536]) :]


def _read_exactly(pipe: BinaryIO, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise TimeoutError
        part = os.read(pipe.fileno(), count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


class SandboxedCallable:
    """A user function by `path.py:name` that runs in a Worker; a call over the limit makes its samples invalid."""

    def __init__(self, spec: str, seconds: float) -> None:
        from .callables import load_reward_fn

        self.__signature__ = inspect.signature(load_reward_fn(spec))  # also finds a bad path now, not at the first call
        self.__name__ = spec.rpartition(":")[2]
        self.seconds = seconds
        path, _, name = spec.rpartition(":")
        self._worker = Worker(f"{Path(path).expanduser().resolve()}:{name}")

    def __call__(self, **arguments: Any) -> Any:
        try:
            return from_json(self._worker.call(arguments, self.seconds))
        except CallTimeout as late:
            raise ScoringFailed(str(late)) from None

    def close(self) -> None:
        self._worker.close()


def from_json(value: Any) -> Any:
    """Undo the marks of `to_json`."""
    if isinstance(value, list):
        return [from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.get("pair") is True:
        return from_json(value["scores"]), value["metrics"]
    return Failed(value["failed"]) if list(value) == ["failed"] else {k: from_json(v) for k, v in value.items()}


def to_json(value: Any) -> Any:
    """JSON values of a result: tensors and arrays become lists, (scores, metrics) a marked object."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return {"pair": True, "scores": to_json(value[0]), "metrics": to_json(value[1])}
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
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
    if path.endswith(".py"):
        from .callables import load_reward_fn

        return load_reward_fn(spec).function
    from importlib import import_module

    return vars(import_module(path))[name]


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _answer(function: Callable[..., Any], payload: bytes) -> dict[str, Any]:
    try:
        seconds, arguments = pickle.loads(payload)  # from the parent process, over its own pipe
        signal.setitimer(signal.ITIMER_REAL, seconds + ORPHAN_SECONDS)
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return {"result": to_json(result)}
    except Exception as error:
        return {"error": _describe(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _serve(spec: str) -> None:
    """The child: load, say so, answer until the pipe closes. What the function prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")

    def write(answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        answers.write(_HEADER.pack(len(data)) + data)
        answers.flush()

    try:
        function = _load(spec)
    except Exception as error:
        write({"error": f"{type(error).__name__}: {error}"})
        return
    write({})
    while len(header := requests.read(_HEADER.size)) == _HEADER.size:
        write(_answer(function, requests.read(_HEADER.unpack(header)[0])))


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.TextIOWrapper(os.fdopen(os.dup(2), "wb"), line_buffering=True)):
        _serve(sys.argv[1])
