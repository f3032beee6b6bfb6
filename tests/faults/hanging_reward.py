"""A reward that does not return from its second call on rank 1, where the environment says so."""

import os
import threading
from pathlib import Path

calls = 0


def score(responses, references):
    global calls
    calls += 1
    hangs = os.environ.get("HANG_MARK")
    if calls == 2 and os.environ["RANK"] == "1" and hangs:
        Path(hangs).touch()
        while True:
            threading.Event().wait(60)
    return [float(response == reference) for response, reference in zip(responses, references)]
