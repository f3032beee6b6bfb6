"""A callable in a process of its own, with a time limit that nothing it does can outlast.

Arguments go to the child by pickle over a socket pair of theirs; answers come back as JSON only, a line each. A request
has an id of its own, which its answer repeats. A line without it costs the call it is read in, so no call gets another
one's answer. A call that runs over its limit, or a child that ends, costs that call as well: the child is killed and
the next call gets a fresh one. This bounds time. It is no jail: the function runs with the user's own rights.
"""

import contextlib
import dis
import fcntl
import functools
import inspect
import json
import os
import pickle
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import ConfigError, RewardError
from .calls import (
    Failed,
    LoadedFunction,
    RemoteCallable,
    ScoringFailed,
    describe_error,
    invoke,
    leave_signals,
    masked,
    source_line_now,
)
from .loading import load_reward_fn
from .surroundings import FORKED

START_SECONDS = 120.0  # importing the function's module does not count against a call
TOLD_AT = 0.5  # share of the limit after which the child says where it is
ORPHAN_SECONDS = 5.0  # a child whose parent died ends itself this long after its limit (default action of SIGALRM)
READY = "ready"  # instead of a request's id: the child has loaded its function
HEAD = struct.Struct("!16sQ")  # before each request: its id, and the length of its pickle in bytes
CHUNK = 2**16  # bytes that are read at once
LONGEST_LINE = 2**29  # bytes of a message
FILES = 1024  # the usual limit of a process's files; the child keeps its pipe in the upper half
TUPLE, FAILED = "\0tuple", "\0failed"  # marks in an answer, which no metric of a user is called
SHOWN = 60  # bytes of a line that is no answer


class NotAnAnswer(Exception):
    """What was read is no answer to the request; the text shows it."""


class CallTimeout(Exception):
    """The call ran over its limit, or its process ended without an answer; the text says which."""


class Connection:
    """The asking end of a socket, at whose other one a process has a `Pipe`. One request at a time.

    seen: where the last request's call was when half of its time was over; empty before that.
    """

    def __init__(self, ours: socket.socket) -> None:
        self.socket, self.seen = ours, ""
        self._unread = b""

    def ask(self, payload: bytes | None, seconds: float) -> dict[str, Any]:
        """The answer to a pickled request, or with None to the start of the process.

        Raises TimeoutError where it is not there after `seconds`, OSError where the process is gone, and NotAnAnswer
        where something else came; nothing more can be asked then.
        """
        number = READY if payload is None else secrets.token_hex(8)  # nothing in the child guesses it
        until, self.seen = time.monotonic() + seconds, ""
        if payload is not None:
            self._limit(until)
            self.socket.sendall(HEAD.pack(number.encode(), len(payload)))
            self.socket.sendall(payload)
        while "place" in (reply := self._reply(number, until)):
            self.seen = reply["place"]
        if self._unread:
            raise NotAnAnswer(f"{self._unread[:SHOWN]!r} after its answer")
        return reply

    def _reply(self, number: str, until: float) -> dict[str, Any]:
        """The next message about the request, without its id."""
        line = self._line(until)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise NotAnAnswer(f"{line[:SHOWN]!r}") from None
        if not isinstance(reply, dict) or reply.pop("request", None) != number or len(reply) != 1:
            raise NotAnAnswer(f"{line[:SHOWN]!r}")
        return reply

    def _line(self, until: float) -> bytes:
        """The next line, without its end."""
        parts, size, chunk = [], 0, self._unread
        while b"\n" not in chunk:
            parts.append(chunk)
            self._limit(until)
            chunk = self.socket.recv(CHUNK)
            size += len(chunk)
            if not chunk:
                raise ConnectionError
            if size > LONGEST_LINE:
                raise NotAnAnswer(f"{size} bytes without an end")
        last, _, self._unread = chunk.partition(b"\n")
        return b"".join([*parts, last])

    def _limit(self, until: float) -> None:
        self.socket.settimeout(max(0.001, until - time.monotonic()))


def started(module: str, argument: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A process that runs a module, the first of a group. It imports what this one does; what it prints goes to stderr.

    Args:
        module: by its dotted name.
        argument: first word of its command line.
        theirs: its end of a socket, which is closed here; the number of its file is the second word.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with theirs:
        command = [sys.executable, "-u", "-m", module, argument, str(theirs.fileno())]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()], process_group=0
        )


class Worker:
    """A child process that loads `spec` once and answers calls. spec: `path.py:name` or `package.module:name`."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def call(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The function's result as JSON values. Raises CallTimeout after `seconds`, and RewardError with the message
        and lines of what the function raised, or when something else than the answer is in the pipe."""
        request = pickle.dumps((seconds, dict(arguments)))
        with self._one_at_a_time:
            if self._process is None or self._process.poll() is not None:
                self._start()
            answer = self._ask(request, seconds)
        if "error" in answer:
            raise RewardError(f"reward function {self._name} {masked(answer['error'])}")
        return answer["result"]

    def scored(self, arguments: Mapping[str, Any], seconds: float, library: str) -> Any:
        """The result of `call`, or `Failed` where there is none.

        Args:
            arguments: as of `call`, as `seconds` is.
            library: which the function asks, and a reason of too long a call names.
        """
        try:
            return self.call(arguments, seconds)
        except CallTimeout as late:
            return Failed(f"{library}: {late}")
        except RewardError as error:
            return Failed(str(error))

    @property
    def _name(self) -> str:
        return self.spec.rpartition(":")[2]

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours)
        self._process = started(__name__, self.spec, theirs)
        try:
            ready = self._ask(None, START_SECONDS)
        except CallTimeout as late:
            raise RewardError(f"the process of reward function {self.spec} did not start: {late}") from None
        if "error" in ready:
            self.close()
            raise ConfigError(f"reward function {self.spec} cannot be loaded: {masked(ready['error'])}")

    def _ask(self, request: bytes | None, seconds: float) -> dict[str, Any]:
        """The answer, to the start of the process or to a request. Raises CallTimeout."""
        answer = None
        try:
            answer = self._connection.ask(request, seconds)
            return answer
        except NotAnAnswer as stray:
            raise RewardError(
                f"reward function {self._name}: its process sent what is no answer to this call "
                f"({masked(str(stray))}); something writes to a file that is not its own, such as a process it forked"
            ) from None
        except TimeoutError:
            raise CallTimeout(f"no result within {seconds:g} s{self._connection.seen}") from None
        except OSError:
            raise CallTimeout(f"its process died{self._exit_code()}{self._connection.seen}") from None
        finally:
            if answer is None:  # also when a signal ended the wait: its answer may still come
                self.close()

    def _exit_code(self) -> str:
        try:
            return f" (exit code {self._process.wait(timeout=1)})"
        except subprocess.TimeoutExpired:
            return ""

    def close(self) -> None:
        """End the child at once, and what the function has started in it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it may have gone to another group
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            self._connection.socket.close()
            self._process = None


HANDED_ON = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]  # (*args, **kwargs)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """What a call takes; of a torch module that hands all on, what its forward takes, or the module that it is a front
    of, as of torch.compile; of a decorator's function likewise, what the one function takes that it holds. Raises as
    `inspect.signature`."""
    inner, torch = inspect.unwrap(function), sys.modules.get("torch")
    if inspect.isfunction(inner) and _hands_on(inner):
        held = list(_held(inner))
        if len(held) == 1 and any(each.opname == "CALL_FUNCTION_EX" for each in dis.get_instructions(inner)):
            return signature_of(held[0])
    if torch is None or not isinstance(inner, torch.nn.Module) or not _hands_on(inner.__call__):
        return inspect.signature(function)
    behind = getattr(inner, "_orig_mod", getattr(inner, "module", None)) if _hands_on(inner.forward) else None
    return inspect.signature(inner.forward) if behind is None else signature_of(behind)


def _hands_on(function: Callable[..., Any]) -> bool:
    return [p.kind for p in inspect.signature(function).parameters.values()] == HANDED_ON


def _held(function: Any) -> Iterator[Any]:
    """The functions and methods in its closure."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            if inspect.isroutine(cell.cell_contents) or isinstance(cell.cell_contents, functools.partial):
                yield cell.cell_contents


class SandboxedCallable(RemoteCallable):
    """A user function, loaded by path, that runs in a Worker; a call over the limit makes its samples invalid.
    settings: the names of its settings."""

    def __init__(self, loaded: LoadedFunction, seconds: float, settings: Collection[str] = ()) -> None:
        self.__signature__ = signature_of(loaded)
        if inspect.isclass(loaded.function) or not {*self.__signature__.parameters} - {"device", *settings}:
            raise ConfigError(f"reward_fn_timeout cannot run {loaded.spec}, which makes its scorer at the start")
        self.function, self.seconds = loaded.function, seconds
        path, _, name = loaded.spec.rpartition(":")
        self._worker = Worker(f"{Path(path).expanduser().resolve()}:{name}")

    def invoke(self, arguments: Mapping[str, Any]) -> Any:
        """One call, or one for each of SAMPLES, in the process. Raises ScoringFailed when there is no answer."""
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
    if list(value) == [TUPLE]:
        return tuple(from_json(entry) for entry in value[TUPLE])
    return Failed(value[FAILED]) if list(value) == [FAILED] else {k: from_json(v) for k, v in value.items()}


def to_json(value: Any) -> Any:
    """JSON values of a result: tensors and arrays become lists, tuples and Failed marked objects."""
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [to_json(entry) for entry in value]}
    if isinstance(value, list):
        return [to_json(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Failed):
        return {FAILED: value.reason}
    if type(value).__module__.partition(".")[0] in ("torch", "numpy"):
        return to_json((value.detach().cpu() if type(value).__module__ == "torch" else value).tolist())
    raise TypeError(f"a {type(value).__name__} cannot leave the reward process; give lists or tensors of numbers")


def _load(spec: str) -> Callable[..., Any]:
    path, _, name = spec.rpartition(":")
    function = load_reward_fn(spec).function if path.endswith(".py") else vars(import_module(path))[name]
    if "model_reward_list" in inspect.signature(function).parameters:
        import_module("torch")  # its tensors; the import must not count against the first call
    return function


def answer_call(function: Callable[..., Any], payload: bytes, send: Callable[[Any], None]) -> dict[str, Any]:
    """The child's answer to a request.

    Args:
        function: what is called.
        payload: the pickle of (seconds, keyword arguments).
        send: tells in between where the call is, when half of the time is over.

    Returns:
        {"result"}, or {"error"} with what the function raised.
    """
    try:
        seconds, arguments = pickle.loads(payload)  # from the parent process, over its own pipe
        signal.setitimer(signal.ITIMER_REAL, seconds + ORPHAN_SECONDS)
        with _source_line_told(TOLD_AT * seconds, send):
            return {"result": to_json(invoke(function, arguments))}
    except BaseException as error:
        return {"error": describe_error(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _source_line_told(seconds: float, send: Callable[[Any], None]) -> Iterator[None]:
    """Send where this thread is when it is still inside after `seconds`."""
    owner = threading.get_ident()

    def tell() -> None:
        with contextlib.suppress(ConnectionError):  # the run has ended
            send({"place": source_line_now(owner)})

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # its message belongs before the answer


class Pipe:
    """The child's end. Only the process that made it reads and writes: one that is forked from it has no such file, and
    ends where it would send."""

    def __init__(self, number: int) -> None:
        self._owner, self._lock, self._request = os.getpid(), threading.Lock(), READY
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Away from numbers that functions close, write to or take over; and not for programs that they start.
        moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, (allowed if 0 < allowed < FILES else FILES) // 2)
        os.close(number)
        self._socket = socket.socket(fileno=moved)
        self._file = self._socket.makefile("rb")
        os.register_at_fork(after_in_child=lambda: os.close(moved))

    def next(self) -> bytes:
        """The pickle of the next request. Raises EOFError when the parent has closed its end."""
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size:
            raise EOFError
        number, length = HEAD.unpack(head)
        payload = self._file.read(length)
        if len(payload) < length:
            raise EOFError
        self._request = number.decode()
        return payload

    def send(self, message: Mapping[str, Any]) -> None:
        """One message about the request that was read last; about none before the first."""
        if os.getpid() != self._owner:
            told = "error: a reward function forked a process that came back from its call; that process ends"
            print(told, file=sys.stderr, flush=True)
            os._exit(FORKED)
        try:
            line = json.dumps({"request": self._request, **message})
        except ValueError as error:  # an integer of more digits than Python writes
            line = json.dumps({"request": self._request, "error": describe_error(error)})
        with self._lock:
            self._socket.sendall(f"{line}\n".encode())


def _serve(spec: str, pipe: Pipe) -> None:
    """The child: load, say so, answer until the parent closes its end."""
    leave_signals()
    try:
        function = _load(spec)
    except BaseException as error:
        pipe.send({"error": str(error) if isinstance(error, ConfigError) else describe_error(error)})
        return
    answer: dict[str, Any] = {"result": None}
    while True:
        pipe.send(answer)
        try:
            payload = pipe.next()
        except EOFError:
            return
        answer = answer_call(function, payload, pipe.send)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the run has ended
        _serve(sys.argv[1], Pipe(int(sys.argv[2])))
