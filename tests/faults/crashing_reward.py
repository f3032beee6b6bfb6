"""A reward that once kills its process, and another time never returns, where the environment says so."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

calls = 0


def score(responses, references):
    global calls
    calls += 1
    mark, hangs = Path(os.environ["CRASH_MARK"]), os.environ.get("HANG_MARK")
    if calls == 3 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == 2 and os.environ["RANK"] == "1" and hangs:
        Path(hangs).touch()
        while True:
            threading.Event().wait(60)
    return [float(response == reference) for response, reference in zip(responses, references)]
