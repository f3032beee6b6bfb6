"""What a user's function changes around itself is put back: streams, folder, warnings, torch's modes, signals,
umask, decimal numbers, garbage collector, NumPy's errors, locale, random states, recursion limit, environment, module
path.

A reward function may do all of this for its own good. The run that called it still needs its output, its folder and
its gradients afterwards. What is named from decimal numbers on is users' code's own: its next call finds it as it was
left.
"""

from __future__ import annotations

import contextlib
import decimal
import gc
import locale
import logging
import os
import random
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)
STREAMS = {"stdout": 1, "stderr": 2}
FORKED = 70  # exit code of a child that a user's function made by os.fork and let run on (EX_SOFTWARE)
LIBRARIES = (f"{Path(__file__).parents[2]}/", f"{sysconfig.get_path('stdlib')}/", "<frozen ", "<string>")
EVERY_WARNING = (None, Warning, None, 0)  # of a filter: message, category, module, line
_one_at_a_time = threading.Lock()
_said: set[str] = set()
_users: dict[str, Any] = {}  # what users' code left for its next call


def is_users(filename: str) -> bool:
    """Whether a line of this file is a user's own, neither ours nor a library's."""
    return not filename.startswith(LIBRARIES) and "site-packages" not in filename


@contextlib.contextmanager
def put_back(what: str, importing: bool = False) -> Iterator[None]:
    """Put back afterwards what a user's code changed, and say once what it was. `what`: the code's name.

    importing: a file or module is imported; what it does to environment and module path stays, for whatever it has
    imported. Of calls that run at once, in threads, the first one watches.
    """
    if not _one_at_a_time.acquire(blocking=False):
        yield
        return
    process = os.getpid()
    watches = [_limits(), _folder(), _streams(), _warnings(), _torch_modes(), _own_modes(), _random_states()]
    watches += [] if importing else [_environment(), _module_path()]
    for watch in watches:
        next(watch)
    try:
        yield
    finally:
        if os.getpid() != process:
            told = f"error: {what} forked a process that came back into the run; that process ends"
            print(told, file=sys.stderr, flush=True)
            os._exit(FORKED)
        for told in filter(None, map(next, watches)):
            say_once(f"{what} {told}")
        _one_at_a_time.release()


def say_once(text: str) -> None:
    """Say what a user's code changes."""
    if text not in _said:
        _said.add(text)
        log.warning("%s; it is put back after each call", text)


# Looks at one thing up to its first `yield`; after that it puts the thing back, and yields what to say of it, or None.
Watch = Iterator[str | None]


def _folder() -> Watch:
    try:
        before = os.getcwd()
    except OSError:  # somebody removed it: there is no way back
        before = None
    yield None
    with contextlib.suppress(OSError):  # the run may stand in a folder that is gone
        if before in (None, os.getcwd()):
            yield None
            return
    enter_again(str(before))
    yield "changes the working directory"


def enter_again(folder: str) -> bool:
    """Make it the working directory; whether another one was."""
    with contextlib.suppress(OSError):
        if os.getcwd() == folder:
            return False
    try:
        os.chdir(folder)
    except OSError as error:
        log.warning("the working directory %s cannot be entered again: %s", folder, error)
    return True


@dataclass(eq=False)
class BorrowedStream:
    """A stream of the run in a user's hands: all but closing it reaches the stream, which others hold as well."""

    stream: TextIO
    closed: bool = False

    def close(self) -> None:
        """Only remembered."""
        self.closed = True

    def __enter__(self) -> BorrowedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _streams() -> Watch:
    """stdout and stderr, as Python's objects and as the process's files."""
    lent: dict[str, tuple[BorrowedStream, int]] = {}
    for name, number in STREAMS.items():
        with contextlib.suppress(OSError):  # a process may have been started without it
            lent[name] = BorrowedStream(getattr(sys, name)), os.dup(number)
            setattr(sys, name, lent[name][0])
    yield None
    changed = []
    for name, (stream, spare) in lent.items():
        if stream.closed or getattr(sys, name) is not stream:
            changed.append(name)
        setattr(sys, name, stream.stream)
        try:
            os.fstat(STREAMS[name])
        except OSError:  # the process's file is closed
            os.dup2(spare, STREAMS[name])
            changed.append(name)
        os.close(spare)
    yield f"closes or replaces {' and '.join(dict.fromkeys(changed))}" if changed else None


def _warnings() -> Watch:
    """Filters that turn warnings into errors hold for the call or the import alone, those for every warning for users'
    code; others may stay, since libraries have some. The run's own are there again."""
    before = list(warnings.filters)
    own = [each for each in _users.get("warnings", ()) if each not in before]
    if own:
        _set_filters(own + before)
    yield None
    new = [each for each in warnings.filters if each not in before]
    errors = [each for each in new if each[0] == "error"]
    every = [each for each in new if each[1:] == EVERY_WARNING and each not in errors]
    removed = [each for each in before if each not in warnings.filters]
    _users["warnings"] = every
    if errors or every or removed:
        _set_filters([each for each in new if each not in errors + every] + before)
    changed = "changes the filters of warnings" if every != own or removed else None
    yield "turns warnings into errors" if errors else changed


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # which also makes Python forget what it has decided by the old ones
    warnings.filters.extend(filters)


Mode = tuple[Callable[[], Any], Callable[[Any], Any]]  # what reads it, and what sets it


def _modes(modes: Mapping[str, Mode], whose: str, own: bool = False) -> Watch:
    """own: users' code finds them as it left them."""
    before = {name: get() for name, (get, _) in modes.items()}
    entered = before | {name: _users[name] for name in modes if own and name in _users}
    for name in modes:
        if entered[name] != before[name]:
            modes[name][1](entered[name])
    yield None
    now = {name: get() for name, (get, _) in modes.items()}
    changed = [name for name in modes if now[name] != entered[name]]
    if own:
        _users.update((name, now[name]) for name in changed)
    for name in modes:
        if now[name] != before[name]:
            modes[name][1](before[name])
    yield f"changes {whose} {' and '.join(changed)}" if changed else None


def _own_modes() -> Watch:
    set_locale = partial(locale.setlocale, locale.LC_ALL)
    modes: dict[str, Mode] = {
        "context of decimal": (_decimals, _count),
        "locale": (set_locale, set_locale),
        "garbage collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "thresholds of the garbage collector": (gc.get_threshold, lambda told: gc.set_threshold(*told)),
        "debugging of the garbage collector": (gc.get_debug, gc.set_debug),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        modes["numpy.seterr"] = numpy.geterr, lambda told: numpy.seterr(**told)
    return _modes(modes, "the", own=True)


def _decimals() -> tuple[Any, ...]:
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, dict(now.traps)


def _count(told: tuple[Any, ...]) -> None:
    decimal.setcontext(decimal.Context(*told[:6], flags=[], traps=told[6]))


def _torch_modes() -> Watch:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return _modes({}, "torch's")
    modes: dict[str, Mode] = {
        "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (torch.get_default_device, _set_device),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    }
    for kind in filter(None, (torch.device("cpu"), torch.accelerator.current_accelerator())):
        on, put = partial(torch.is_autocast_enabled, kind.type), partial(torch.set_autocast_enabled, kind.type)
        modes[f"autocast on {kind.type}"] = on, put
    return _modes(modes, "torch's")


def _set_device(device: Any) -> None:
    """No default device is told as the CPU, and nothing is slower than the CPU set as one."""
    sys.modules["torch"].set_default_device(None if device.type == "cpu" else device)


def _limits() -> Watch:
    """The umask, the recursion limit, the run's handlers of signals, the signals that this thread blocks, and an alarm,
    whose signal would end the process. A handler of SIGALRM stays: a file may set it once for all calls."""
    before, mask = sys.getrecursionlimit(), os.umask(0o077)  # a umask can only be read by setting it
    os.umask(mask)
    entered = max(before, _users.get("recursion limit", before))
    sys.setrecursionlimit(entered)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    blocked, others = signal.pthread_sigmask(signal.SIG_BLOCK, ()), any(signal.getitimer(signal.ITIMER_REAL))
    yield None
    changed = ["alarm"] * (not others and any(signal.setitimer(signal.ITIMER_REAL, 0)))
    changed += ["blocked signals"] * (signal.pthread_sigmask(signal.SIG_SETMASK, blocked) != blocked)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
            changed.append(f"handler of {number.name}")
    _users["recursion limit"] = now = sys.getrecursionlimit()
    sys.setrecursionlimit(before)
    changed += ["recursion limit"] * (now != entered) + ["umask"] * (os.umask(mask) != mask)
    yield f"changes the {' and the '.join(changed)}" if changed else None


def _random_states() -> Watch:
    """Users' code draws from streams of its own, which begin as those of the run are at its first call."""
    before = random_states()
    put_random_states(_users.get("random states", {}))
    entered = _users.get("random states", before)
    yield None
    now = random_states()
    if not _alike(now, entered):
        _users["random states"] = now
    if not _alike(now, before):
        put_random_states(before)
    yield None


def random_states() -> dict[str, Any]:
    """Random states of Python, and where they are in use of NumPy, torch and this rank's accelerator."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    states: dict[str, Any] = {"python": random.getstate()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch is not None:
        states["torch"], device = torch.get_rng_state(), torch.get_device_module()
        if hasattr(device, "get_rng_state") and device.is_initialized():
            states["accelerator"] = device.get_rng_state()
    return states


def put_random_states(states: Mapping[str, Any]) -> None:
    """Set what `random_states` gave; what is not there stays."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "accelerator" in states:
        sys.modules["torch"].get_device_module().set_rng_state(states["accelerator"])


def rng_state() -> dict[str, Any]:
    """`random_states`, and those of users' code where it has drawn: what a checkpoint holds."""
    own = _users.get("random states", {})
    return random_states() | ({"users": own} if own else {})


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave."""
    put_random_states(state)
    _users.pop("random states", None)
    if state.get("users"):
        _users["random states"] = dict(state["users"])


def _alike(some: Any, other: Any) -> bool:
    if isinstance(some, Mapping):
        return some.keys() == other.keys() and all(_alike(some[name], other[name]) for name in some)
    if isinstance(some, tuple) and any(hasattr(each, "all") for each in some):  # NumPy's
        return len(some) == len(other) and all(map(_alike, some, other))
    return bool((some == other).all()) if hasattr(some, "all") else some == other


def _environment() -> Watch:
    before, own = dict(os.environ), _users.get("environment", {})
    _change_environment(own)
    entered = dict(os.environ)
    yield None
    now = dict(os.environ)
    _users["environment"] = own = {name: now.get(name) for name in before | now if before.get(name) != now.get(name)}
    _change_environment({name: before.get(name) for name in own})
    changed = sorted(name for name in entered | now if entered.get(name) != now.get(name))
    yield f"changes the environment ({', '.join(changed)})" if changed else None


def _change_environment(changes: Mapping[str, str | None]) -> None:
    """None: the variable is gone."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _module_path() -> Watch:
    path, before = sys.path, list(sys.path)
    path[:0] = [each for each in _users.get("module path", ()) if each not in before]
    entered = list(path)
    yield None
    now, sys.path = list(sys.path), path
    path[:] = before
    _users["module path"] = [each for each in now if each not in before]
    yield None if now == entered else "changes sys.path"
