"""How many ranks the launcher has started, whether it is still there, and what a lost terminal does."""

import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from ..errors import ConfigError, writable

FRONTS = ("deepspeed", "ds", "deepspeed.launcher.runner")  # start one of the following and wait for it
STARTERS = (
    "deepspeed.launcher.launch", "torchrun", "torch.distributed.run", "torch.distributed.launch",
    "accelerate", "accelerate-launch", "accelerate.commands.launch",
)  # fmt: skip
WITH_VALUE = ("-W", "-X")  # options of Python whose value may be the next word
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and mpirun: processes they have started
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT")
STARTED_BY = "LIGHTRFT_STARTED_BY"  # environment variable: the process that a rank's launcher has put beside it


def ranks_started() -> int:
    """By the launcher, which numbers them by RANK. Without that there is one, whatever else a shell has left over."""
    return int(os.environ.get("WORLD_SIZE") or 1) if os.environ.get("RANK") else 1


def check_launch() -> None:
    """Raise ConfigError where the launcher's variables, which say what rank this process is, hold no such numbers,
    or numbers that cannot be. Empty ones are taken out: libraries would read them."""
    for name in (*RANK_VARIABLES, "MASTER_ADDR"):
        if not os.environ.get(name, "0"):
            del os.environ[name]
    for name in RANK_VARIABLES:
        text = os.environ.get(name, "0")
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(
                f"the environment variable {name} is {writable(text)!r}; a launcher sets it to a whole number: unset "
                "it, or start the run by deepspeed or torchrun"
            )
    ranks = ranks_started()
    if ranks != 1 and int(os.environ["RANK"]) >= ranks:
        raise ConfigError(f"RANK is {os.environ['RANK']} of WORLD_SIZE {ranks}; ranks count from 0")
    if ranks > 1 and not 0 < int(os.environ.get("MASTER_PORT", "1")) < 2**16:
        raise ConfigError(f"MASTER_PORT is {os.environ['MASTER_PORT']}; ports are 1 to 65535")


def above_one(names: Sequence[str]) -> str | None:
    """'NAME is N' of the first of these variables of the environment that says more than one."""
    found = ((name, os.environ.get(name, "")) for name in names)
    return next((f"{name} is {text}" for name, text in found if text.isdecimal() and int(text) > 1), None)


def ranks_on_host() -> int:
    """Of `ranks_started` those on this host, by LOCAL_WORLD_SIZE (torchrun) or LOCAL_SIZE (DeepSpeed); else all."""
    ranks = ranks_started()
    return ranks if ranks == 1 else int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks)


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
    with suppress(psutil.Error):
        return program(process.cmdline()) in FRONTS + STARTERS
    return False


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
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
    leave_lost_outputs()
    signal.raise_signal(signal.SIGTERM)


def leave_lost_outputs() -> None:
    """Where the terminal, or who reads a pipe, is gone, writing is an error: what is written there goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        looked = select.poll()
        looked.register(output, 0)  # that nobody reads is told unasked
        with suppress(OSError):  # one that is closed
            device = stat.S_ISCHR(os.fstat(output).st_mode)
            if not os.isatty(output) if device else looked.poll(0):
                os.dup2(nowhere, output)
    os.close(nowhere)


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
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
