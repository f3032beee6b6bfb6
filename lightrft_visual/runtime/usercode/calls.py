"""Calling what a user wrote: saying where it fails and where it hangs, and letting SIGTERM end it."""

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Number
from types import FrameType
from typing import Any

from ...errors import RewardError, StoppedBySignal
from ..masking import CONTROLS, mask_text
from ..presence import leave_lost_outputs
from ..start_up import error_output, say_last
from .surroundings import OURS, is_users, on_device_of_caller, put_back, say_once

log = logging.getLogger(__name__)


class BackgroundLoop:
    """Runs coroutines beside the caller, in a thread that the first of them starts; `submit` returns at once with a
    concurrent future."""

    def __init__(self, name: str = "reward-loop") -> None:
        self._name, self._ended, self._starting = name, False, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop, which goes on when a coroutine of a user's stops it, or a task of its own calls sys.exit."""
        while not self._ended:
            try:
                loop.run_forever()
            except BaseException as error:
                log.warning("a task in the background ended by %s", type(error).__name__)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Run a coroutine in the loop's thread; the future holds its result."""
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                run = on_device_of_caller(functools.partial(self._run, loop))
                self._thread = threading.Thread(target=run, name=self._name, daemon=True)
                self._thread.start()
                self._loop = loop
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the coroutine's result; its exception is raised here."""
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Stop the loop, if it was ever started, and wait for its thread."""
        if self._loop is None:
            return
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


_shared = BackgroundLoop()  # of the process


@dataclass(frozen=True)
class Failed:
    """One sample that a scorer tried and could not score; `reason` is a few words without any payload.

    A scorer may put it in its list of scores. It makes the sample invalid, where None only leaves the scorer out.
    """

    reason: str


class ScoringFailed(Exception):
    """A scorer gave no scores for a whole call; its samples become invalid, the run goes on."""


SLOW_SECONDS = 30.0  # after this long, then after twice as long each time, a line says what is still running
TERM_SECONDS = 10.0  # a function gets this long to return after SIGTERM, so that its step can still be done
REMINDERS = 3  # so many times as long, and the process ends: the function is in native code that never returns
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended, as shells give it
ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what schedulers and terminals send to all
ONE_SIGNAL = 2.0  # seconds within which a second Ctrl-C counts as the same: launchers send it again
FORGOTTEN = 600.0  # seconds after which one counts as a first again, in processes that may outlive a run
LONGEST_MESSAGE = 1000
POSITIONAL = "*"  # beside arguments: a list of those that stand before them
SAMPLES = "*samples"  # instead of arguments: a list of them, one for each sample
LOG_EXTRA, LOG_METRIC = "*log_extra", "*log_metric"
SHOWN_LINES = 12  # of the first and of the last lines that an error went through
SHOWN_CAUSES = 4


class UserCodeExited(RewardError):
    """A user's function called sys.exit and the like, or SIGTERM came: no policy goes on after that."""


class Interrupted(BaseException):
    """SIGTERM, raised inside a user's function that runs on."""


class StopRequest:
    """A handler of SIGTERM that remembers whether the signal came; user code asks it by `ended_by_sigterm`."""

    def __init__(self) -> None:
        self.made = False

    def __call__(self, *_: object) -> None:
        self.made = True


class Interrupt:
    """A handler of SIGINT: the first Ctrl-C does what SIGTERM does here. A second one ends a script of ours at
    once; in a program it is a KeyboardInterrupt, and the program may go on. The handler of a script `ends_process`."""

    def __init__(self) -> None:
        self.first: float | None = None  # when it came
        self.of_script = getattr(signal.getsignal(signal.SIGINT), "ends_process", False)

    def __call__(self, *_: object) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now
            if os.environ.get("RANK", "0") == "0":
                _say("Ctrl-C: this step is finished and a checkpoint saved; once more ends the run without it")
            signal.raise_signal(signal.SIGTERM)
        elif now - self.first > ONE_SIGNAL:
            _say("error: ended at once by a second Ctrl-C; what was saved stays")
            if not self.of_script:
                raise KeyboardInterrupt
            os._exit(INTERRUPTED)


class InterruptOfChild:
    """A handler of SIGINT in a process that a user's code forks, which a Ctrl-C reaches as it does the run: a second
    one soon after the first ends it. Much later one may be the first of another run.

    first: when it came, of a run that was interrupted before it forked.
    """

    def __init__(self, first: float | None) -> None:
        self.first = first

    def __call__(self, *_: object) -> None:
        since = float("inf") if self.first is None else time.monotonic() - self.first
        if ONE_SIGNAL < since < FORGOTTEN:
            os._exit(INTERRUPTED)
        if since >= FORGOTTEN:
            self.first = time.monotonic()


def leave_signals() -> None:
    """By no signal this process ends before its parent."""
    for number in ASKED_TO_END:
        signal.signal(number, _leave)


def _leave(*_: object) -> None:
    """No ignored signal: that would stay so in what this process starts."""


def _hold_signals() -> None:
    """What comes while a process is forked waits until it is clear whose it is."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_END)


def _own_signals() -> None:
    """A process that a user's code forks can be ended, as a pool ends its workers; of what comes to the run as well, it
    waits for what the run does."""
    pressed = InterruptOfChild(getattr(signal.getsignal(signal.SIGINT), "first", None))
    own = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: pressed, signal.SIGHUP: _leave}
    for number, handler in own.items():
        if str(getattr(signal.getsignal(number), "__module__", None)).startswith("lightrft_visual."):
            signal.signal(number, handler)
    _take_signals()


def _take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


_forking = threading.local()
os.register_at_fork(before=_hold_signals, after_in_parent=_take_signals, after_in_child=_own_signals)


def _say(line: str) -> None:
    """On the error output, also where the signal came in the middle of a print, or has ended who reads it (`| tee`)."""
    leave_lost_outputs()
    with contextlib.suppress(OSError):
        os.write(error_output(), f"{line}\n".encode())


class RemoteCallable:
    """A function that runs in another process; `invoke` takes the arguments of a call, or SAMPLES of them."""

    def invoke(self, arguments: dict[str, Any]) -> Any:
        """Call the function with these keyword arguments, wherever it lives."""
        raise NotImplementedError

    def __call__(self, **arguments: Any) -> Any:
        return self.invoke(arguments)


def describe_error(error: BaseException) -> str:
    """What a user's code raised, with its message and the lines of the user's own files, for the middle of a message:
    "raised KeyError: 'x'" and then lines as in a traceback. What it was raised from follows. Ours are left out."""
    told: list[str] = []
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting and len(told) < SHOWN_CAUSES:
        current = waiting.pop(0)
        if id(current) in seen or (told and isinstance(current, RewardError)):
            continue
        seen.add(id(current))
        told.append(f"{what_happened(current)}{_own_lines(current)}")
        cause = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        parts = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        waiting += [each for each in (*parts, cause) if each is not None]
    return "\n  after it ".join(told)


def what_happened(error: BaseException) -> str:
    """An error in a few words: "raised KeyError: 'x'"."""
    try:
        if isinstance(error, SystemExit):
            return f"called sys.exit({error.code!r})"[:LONGEST_MESSAGE]
        message = " ".join(str(error).split("\n"))[:LONGEST_MESSAGE]
    except BaseException as second:
        message = f"(its message cannot be had: {type(second).__name__})"
    return f"raised {type(error).__name__}" + (f": {message}" if message else "")


def _own_lines(error: BaseException) -> str:
    """The user's own lines that an error went through, outermost first; of very many the first and the last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_users(f.filename)]
    if not own and isinstance(error, SyntaxError) and error.filename:
        return f'\n  File "{error.filename}", line {error.lineno}'
    listed = "".join(traceback.format_list(own or frames[-1:])).splitlines()
    lines = [line for line in listed if line.strip(" ^~")]  # without the marks below a line
    left_out = len(lines) - 2 * SHOWN_LINES
    if left_out > 0:
        lines = [*lines[:SHOWN_LINES], f"  ... {left_out} more lines ...", *lines[-SHOWN_LINES:]]
    return "".join(f"\n{line}" for line in lines)


def masked(text: str) -> str:
    """The text without tokens and keys; characters that no file takes or that a terminal obeys are escapes."""
    return mask_text(text).encode(errors="backslashreplace").decode().translate(CONTROLS)


def call(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Any:
    """Call, and await when the result asks for it.

    Whatever it raises, sys.exit included, is chained to a RewardError with its name and the user's own lines.

    Args:
        function: of the user.
        name: of it, for messages.
        arguments: by name; with POSITIONAL and SAMPLES, as of `invoke`.
    """
    with users_code(f"reward function {name}"):
        return invoke(function, arguments)


@contextlib.contextmanager
def users_code(what: str) -> Iterator[None]:
    """Around a user's code, `what`: its errors are RewardErrors, what it changes is put back, and a line says for how
    long it has been running."""
    with AsRewardError(what), put_back(what), watched(what):
        yield


@dataclass
class AsRewardError(contextlib.AbstractContextManager):
    """Whatever a user's code raises in here is a RewardError that says of `what` what it raised, with the user's own
    lines: CancelledError, GeneratorExit and panics of extensions included, but Ctrl-C in the main thread and SIGTERM.
    """

    what: str

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        pressed = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if error is None or pressed or isinstance(error, (RewardError, ScoringFailed, Interrupted)):
            return
        left = isinstance(error, (SystemExit, KeyboardInterrupt))
        raise (UserCodeExited if left else RewardError)(f"{self.what} {masked(describe_error(error))}") from error


def invoke(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a call of the function returns; with SAMPLES, the list of what it returns for each sample's arguments.
    Those of POSITIONAL are given by position.

    Awaitables are awaited. What it said by TRL's `log_extra` and `log_metric` is added to its metrics.
    """
    if isinstance(function, RemoteCallable):
        return function.invoke(arguments)
    said = Said()
    samples = arguments.get(SAMPLES, [arguments])
    samples = [{k: said.by.get(v, v) if isinstance(v, str) else v for k, v in sample.items()} for sample in samples]
    results = [function(*sample.pop(POSITIONAL, ()), **sample) for sample in samples]
    if any(map(inspect.isawaitable, results)):
        results = awaited(results)
    return said.added_to(results if SAMPLES in arguments else results[0])


class Said:
    """What one call says by TRL's `log_extra(column, values)` and `log_metric(name, value)`; the arguments LOG_EXTRA
    and LOG_METRIC stand for these two, so that they can be sent to another process."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.by = {LOG_EXTRA: self.extra, LOG_METRIC: self.metric}

    def metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`: one number under a name."""
        self.metrics[str(name)] = float(value)

    def extra(self, column: str, values: Any) -> None:
        """TRL's `log_extra`: one number for each sample; other columns are dropped with a warning."""
        values = values.tolist() if hasattr(values, "tolist") else values  # of tensors and arrays
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        if all(value is None or isinstance(value, Number) for value in values):
            self.metrics[str(column)] = values
        else:
            log.warning("log_extra: column %r holds more than numbers; only numbers are kept", str(column)[:80])

    def added_to(self, result: Any) -> Any:
        """The result with these metrics."""
        if not self.metrics:
            return result
        if isinstance(result, Mapping):
            return {**result, "extra_logs": {**(result.get("extra_logs") or {}), **self.metrics}}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            return result[0], {**result[1], **self.metrics}
        return result, self.metrics


def awaited(results: list[Any], loop: BackgroundLoop | None = None) -> list[Any]:
    """The results, where awaitable all awaited at once on the loop (None: shared); what one raises is raised here."""

    async def outcome(result: Any) -> tuple[Any, BaseException | None]:
        try:
            return await result if inspect.isawaitable(result) else result, None
        except BaseException as error:  # a SystemExit would end the loop's thread, and the caller would wait for ever
            return None, error

    async def together() -> list[tuple[Any, BaseException | None]]:
        return await asyncio.gather(*map(outcome, results))

    outcomes = (loop or _shared).run(together())
    for error in (error for _, error in outcomes if error is not None):
        raise error
    return [result for result, _ in outcomes]


@contextlib.contextmanager
def watched(what: str) -> Iterator[None]:
    """While it lasts, a line now and then says for how long `what` has been running and where it is, and SIGTERM ends
    it when it does not return within TERM_SECONDS. Signals are handled in the main thread only."""
    done, owner, started = threading.Event(), threading.get_ident(), time.monotonic()

    def tell() -> None:
        wait = SLOW_SECONDS
        while not done.wait(wait):
            seconds = time.monotonic() - started
            log.warning("%s has been running for %.3g s%s", what, seconds, source_line_now(owner))
            wait *= 2

    threading.Thread(target=tell, name="slow-reward", daemon=True).start()
    try:
        with ended_by_sigterm(what):
            yield
    finally:
        done.set()


def source_line_now(owner: int) -> str:
    """`source_line_of` the thread `owner`, or of another one: async functions run in one of their own."""
    frames = sys._current_frames()
    lines = (source_line_of(frames.get(each)) for each in (owner, *frames))
    return next(filter(None, lines), "")


def source_line_of(frame: FrameType | None) -> str:
    """The innermost line of the user's own files, ', at FILE, line N'; empty when there is none."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = next((i for i, f in enumerate(stack) if f.filename.startswith(OURS)), 0)  # above them a script began the run
    own = [f for f in stack[ours:] if is_users(f.filename)]
    return f", at {own[-1].filename}, line {own[-1].lineno}" if own else ""


def who_asked(interrupt: Any) -> str:
    """What asked the run to end, in words: SIGTERM, or the Ctrl-C that does what SIGTERM does. interrupt: the handler
    of SIGINT."""
    return "SIGTERM" if getattr(interrupt, "first", None) is None else "Ctrl-C"


def _stopped_inside(error: BaseException) -> StoppedBySignal | None:
    """What was on its way out already when `error` came: of something that ran inside and was ended first."""
    earlier = error.__context__
    while earlier is not None and not isinstance(earlier, StoppedBySignal):
        earlier = earlier.__context__
    return earlier


@contextlib.contextmanager
def ended_by_sigterm(what: str) -> Iterator[None]:
    """SIGTERM ends what runs inside when it does not return within TERM_SECONDS: by StoppedBySignal, and when that
    cannot be raised there, by the end of the process. The handler that was set before is asked first. Where that is a
    StopRequest and the signal has come already, it counts as coming now: nobody sends it again."""
    before, done, ending = signal.getsignal(signal.SIGTERM), threading.Event(), threading.Lock()
    main, interrupt = threading.main_thread(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not main or not callable(before):
        yield
        return
    asked_at: list[float] = []
    over: list[bool] = []

    def remind() -> None:
        for _ in range(REMINDERS):
            if done.wait(TERM_SECONDS):
                return
            with ending:  # afterwards the signal would meet whatever handler there was before, and may end the process
                if done.is_set():
                    return
                signal.pthread_kill(main.ident, signal.SIGTERM)
        if not done.wait(TERM_SECONDS):
            where = source_line_of(sys._current_frames().get(main.ident))
            asked = who_asked(interrupt)
            say_last(f"error: {what} did not react to {asked}{where}; the process ends")
            os._exit(1 if asked == "SIGTERM" else INTERRUPTED)

    def ask() -> None:
        if not asked_at:
            asked_at.append(time.monotonic())
            threading.Thread(target=remind, daemon=True).start()

    def on_signal(number: int, frame: FrameType | None) -> None:
        before(number, frame)
        if over:
            return
        if asked_at and time.monotonic() - asked_at[0] > 0.9 * TERM_SECONDS:
            where = source_line_of(frame)
            raise Interrupted(f"it did not return within {time.monotonic() - asked_at[0]:.3g} s{where}")
        ask()

    signal.signal(signal.SIGTERM, on_signal)
    try:
        if isinstance(before, StopRequest) and before.made:  # looked at now that a signal reaches `on_signal`
            ask()
        yield
    except Interrupted as error:
        raise _stopped_inside(error) or StoppedBySignal(
            f"the run was ended by {who_asked(interrupt)} while {what} ran: {error}"
        ) from None
    finally:
        over.append(True)  # from here on the handler must not raise
        with ending:
            done.set()
        if signal.signal(signal.SIGTERM, before) != on_signal:
            say_once(f"{what} changes the handler of SIGTERM")


class LoadedFunction:
    """A callable that remembers the `path.py:name` it came from, so that a process of its own can load it again."""

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        functools.update_wrapper(self, function)
        self.function, self.spec = function, spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
