"""SIGTERM to a launcher: it is passed on to the ranks, and the launcher waits for them instead of killing them.

A scheduler signals the process that it started: `deepspeed` or torchrun. By themselves the former dies and leaves its
ranks running; the latter, and what the former has started (`deepspeed.launcher.launch`), kill them after 30 seconds and
end with code 1. PyTorch calls `attend` in every process of this environment that imports it. In a launcher it replaces
what SIGTERM does; in all others it does nothing. Ranks that do not handle SIGTERM, as those of other programs, are
treated as ever.

setup.py installs a copy of this file by itself, with the entry point (torch.backends) that PyTorch reads: it must run
alone, and nothing in it may fail, as PyTorch could then not be imported.

The other way round, `LauncherWatch` tells a rank that its launcher is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

try:
    import psutil
except ImportError:  # the copy in an environment of other programs
    psutil = None

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


def attend() -> None:
    """In a process of a launcher, let SIGTERM wait for the ranks; called once, while PyTorch is imported."""
    running = program(sys.orig_argv)
    if psutil is None:
        return
    if running in FRONTS:
        with contextlib.suppress(ValueError):  # not in the main thread, which alone may handle signals
            signal.signal(signal.SIGTERM, _pass_on)
    elif running in STARTERS:  # they set a handler of their own later
        signal.signal = _setting(signal.signal)


def _pass_on(number: int, _frame: Any) -> None:
    children = psutil.Process().children()
    _send(children, number)
    if not children:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _setting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`signal.signal`, which puts the ranks before a handler of SIGTERM."""

    def set_handler(number: int, handler: Any) -> Any:
        ours = number == signal.SIGTERM and callable(handler)
        return original(number, ranks_first(handler) if ours else handler)

    return set_handler


def ranks_first(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """A handler that leaves the signal to the ranks where all of them handle it; else `handler` has it."""

    def on_signal(number: int, frame: Any) -> None:
        ranks = [child for child in psutil.Process().children() if _is_rank(child)]
        if ranks and all(_handles(rank.pid, number) for rank in ranks):
            _send(ranks, number)
        else:
            handler(number, frame)

    return on_signal


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "RANK" in process.environ()
    except psutil.Error:
        return False


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal; False where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


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
