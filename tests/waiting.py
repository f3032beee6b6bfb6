"""Bounded waits that count pauses instead of reading a clock: a machine that stands still for minutes, as virtual ones
do, would be late by every clock when it goes on."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress


def polls(limit: float, pause: float = 0.2) -> Iterator[None]:
    """One turn every `pause` seconds, until `limit` seconds of them are over."""
    for _ in range(round(limit / pause)):
        yield
        time.sleep(pause)


def output_of(process: subprocess.Popen, limit: float, pause: float = 2.0) -> tuple[str, str | None]:
    """What `communicate` returns when the process has ended. Raises TimeoutExpired when it still runs at the limit."""
    for _ in range(round(limit / pause)):
        with suppress(subprocess.TimeoutExpired):  # counted by the loop; the output so far is kept for the next call
            return process.communicate(timeout=pause)
    raise subprocess.TimeoutExpired(process.args, limit)


def finished(command: list, limit: float, **options) -> subprocess.CompletedProcess:
    """The command when it has ended, with its output as text; it is killed at the limit, and TimeoutExpired raised."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            output, errors = output_of(process, limit)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
