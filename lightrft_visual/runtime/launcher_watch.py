"""Tells a rank that its launcher is gone: nobody waits for this run any more, or can end it.

`deepspeed` dies of a SIGTERM and leaves its ranks running. They then save and end after their step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

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
