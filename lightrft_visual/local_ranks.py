"""Ranks of one run on this host, started and waited for by one process."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from .runtime.host_memory import free_port, nvidia_devices
from .runtime.presence import STARTED_BY, TASKS, above_one

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.1
GRACE = 60.0  # seconds in which ranks that have met end by themselves once one has failed
FORWARDED = (signal.SIGINT, signal.SIGTERM)


def start_ranks(arguments: Sequence[str], ranks: int | None = None) -> int:
    """Run a command or script of this package in several processes, and wait for all of them, however long they save.

    Args:
        arguments: of `lightrft-visual`, or a Python script and its arguments.
        ranks: how many; default: one a GPU, else one.

    Returns:
        The first exit code that is not 0, else 0. Signals go to every rank.
    """
    count = ranks or accelerators() or 1
    command = [sys.executable, *([] if arguments[0].endswith(".py") else ["-m", "lightrft_visual"]), *arguments]
    shared = {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), STARTED_BY: str(os.getpid()),
    }  # fmt: skip
    numbered = ("WORLD_SIZE",) if os.environ.get("RANK") else ()  # else a shell has left it over
    if several := above_one((*TASKS, "PET_NNODES", *numbered)):
        told = f"{several} here, and launch starts a run of this host alone"
        logger.warning("%s; for one run have one task a host start torchrun instead (docs/multi_node.md)", told)
    processes: list[subprocess.Popen] = []
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # under nohup it stays so
    before = {number: signal.signal(number, lambda got, _: _send(processes, got)) for number in (*FORWARDED, *hangup)}
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of their own: Ctrl-C of the terminal reaches them once, from here.
            processes.append(subprocess.Popen(command, env=os.environ | shared | own, start_new_session=True))
        codes = _codes(processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _codes(processes: Sequence[subprocess.Popen]) -> list[int]:
    """Exit codes of all. Once one has failed the others end by themselves, but those that are stopped: they are killed,
    and what counts is the code of the first. Those that still wait to meet it are asked to end after a while; where a
    run saves, that changes nothing."""
    ended: list[subprocess.Popen] = []  # from here
    failed_at, asked = math.inf, False
    while None in (codes := [process.poll() for process in processes]):
        failed_at = min(failed_at, time.monotonic()) if any(codes) else failed_at
        if not asked and time.monotonic() - failed_at > GRACE:
            asked = True
            ended += [process for process in processes if process.poll() is None]
            _send(ended, signal.SIGTERM)
        for process in processes if any(codes) else ():
            if process.poll() is None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                process.kill()
                ended.append(process)
        time.sleep(LOOK_SECONDS)
    return [0 if process in ended else process.wait() for process in processes]


def _send(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def accelerators() -> int:
    """NVIDIA devices that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    return nvidia_devices()
