"""What a run needs to go on, and to give the same numbers, is put back after a call of a user's function: random
states, torch's modes and accelerator, the working folder, stdout and stderr, handlers of signals, a lowered recursion
limit. All else that a function changes, such as the environment or filters of warnings, stays as it leaves it.
"""

import contextlib
import logging
import os
import random
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

log = logging.getLogger(__name__)
FORKED = 70  # exit code of a child that a user's function made by os.fork and let run on (EX_SOFTWARE)
OURS = f"{Path(__file__).parents[2]}/"
LIBRARIES = (OURS, f"{sysconfig.get_path('stdlib')}/", "<frozen ", "<string>")
_one_at_a_time = threading.Lock()
_said: set[str] = set()
_users_states: dict[str, Any] = {}  # random states that users' code left for its next call


def is_users(filename: str) -> bool:
    """Whether a line of this file is a user's own, neither ours nor a library's."""
    return not filename.startswith(LIBRARIES) and not any(
        each in filename for each in ("site-packages", "dist-packages")
    )


@contextlib.contextmanager
def put_back(what: str) -> Iterator[None]:
    """Put back afterwards what a user's code changed, and say once what it was. `what`: the code's name.

    Of calls that run at once, in threads, the first one watches.
    """
    lock = _one_at_a_time
    if not lock.acquire(blocking=False):
        yield
        return
    process, told = os.getpid(), list[str | None]()
    try:
        with contextlib.ExitStack() as way_back:
            way_back.callback(lock.release)
            for watch in (_of_process(), _folder(), lent_streams(), _torch_modes(), _random_states(), _device()):
                next(watch)
                way_back.callback(told.extend, watch)
            try:
                yield
            finally:
                if os.getpid() != process:
                    line = f"error: {what} forked a process that came back into the run; that process ends"
                    print(line, file=sys.stderr, flush=True)
                    os._exit(FORKED)
    finally:
        for change in filter(None, told):
            say_once(f"{what} {change}")


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
    yield "changes the working directory" if before is not None and enter_again(before) else None


def enter_again(folder: str) -> bool:
    """Make it the working directory; whether another one was."""
    with contextlib.suppress(OSError):  # the run may stand in a folder that is gone
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def lent_streams() -> Watch:
    """The outputs, which a user's code may close or replace."""
    ours = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    lent = {name: BorrowedStream(stream) for name, stream in ours.items() if stream is not None}
    for name, stream in lent.items():
        setattr(sys, name, stream)
    yield None
    changed = [name for name, stream in lent.items() if stream.closed or getattr(sys, name) is not stream]
    for name, stream in lent.items():
        setattr(sys, name, stream.stream)
    yield f"closes or replaces {' and '.join(changed)}" if changed else None


def _torch_modes() -> Watch:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield None
        yield None
        return
    modes: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # what reads it, and what sets it
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
    before = {name: get() for name, (get, _) in modes.items()}
    yield None
    changed = [name for name, (get, _) in modes.items() if get() != before[name]]
    for name in changed:
        modes[name][1](before[name])
    yield f"changes torch's {' and '.join(changed)}" if changed else None


def _set_device(device: Any) -> None:
    """No default device is told as the CPU, and nothing is slower than the CPU set as one."""
    sys.modules["torch"].set_default_device(None if device.type == "cpu" else device)


def _of_process() -> Watch:
    """The run's handlers, an alarm, whose signal would end the process, and a lower recursion limit, at which the run
    would end. A handler of SIGALRM and a higher limit stay: a file may set them once for all calls."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE  # a lost connection would end the process
    handlers = {number: signal.getsignal(number) for number in numbers}
    alarm, limit = any(signal.getitimer(signal.ITIMER_REAL)), sys.getrecursionlimit()
    yield None
    changed = ["alarm"] * (not alarm and any(signal.setitimer(signal.ITIMER_REAL, 0)))
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
            changed.append(f"handler of {number.name}")
    if sys.getrecursionlimit() < limit:
        sys.setrecursionlimit(limit)
        changed.append("recursion limit")
    yield f"changes the {' and the '.join(changed)}" if changed else None


def _random_states() -> Watch:
    """Users' code draws from streams of its own, which begin as those of the run are at its first call."""
    before = random_states()
    put_random_states(_users_states)
    yield None
    _users_states.update(random_states())
    put_random_states(before)
    yield None


def _device() -> Watch:
    """The accelerator that this thread computes on, whose random state is put back after it."""
    before = device_here()
    yield None
    changed = before is not None and device_here() != before
    if changed:
        sys.modules["torch"].accelerator.set_device_index(before)
    yield "changes torch's accelerator" if changed else None


def device_here() -> int | None:
    """The number of this thread's accelerator; None where none is at work in this process."""
    torch: Any = sys.modules.get("torch")
    device = torch and torch.get_device_module()
    if not (hasattr(device, "get_rng_state") and device.is_initialized()):
        return None
    return torch.accelerator.current_device_index()


def on_device_of_caller(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function for another thread, which by itself would begin on the host's first accelerator on every rank."""
    index = device_here()

    def run() -> Any:
        if index is not None:
            sys.modules["torch"].accelerator.set_device_index(index)
        return function()

    return run


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
        device = sys.modules["torch"].get_device_module()
        if hasattr(device, "set_rng_state"):  # the states may be of a run on another kind of device
            device.set_rng_state(states["accelerator"])


def rng_state() -> dict[str, Any]:
    """`random_states`, and those of users' code where it has run: what a checkpoint holds."""
    return random_states() | ({"users": dict(_users_states)} if _users_states else {})


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave."""
    put_random_states(state)
    _users_states.clear()
    _users_states.update(state.get("users") or {})
