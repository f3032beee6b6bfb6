"""A reward that kills its process once, on the rank and at the call that the environment names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

calls = 0


def score(responses, references):
    global calls
    calls += 1
    mark = Path(os.environ["CRASH_MARK"])
    if calls == 3 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(response == reference) for response, reference in zip(responses, references)]
