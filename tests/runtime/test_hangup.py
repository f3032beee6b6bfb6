"""A terminal that is lost ends a run as SIGTERM does; a run under nohup goes on."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

from lightrft_visual.runtime.presence import handled, hangup_ends


def test_a_hangup_asks_whoever_listens_for_the_end():
    asked, before = [], signal.getsignal(signal.SIGHUP)
    with handled(signal.SIGTERM, lambda *_: asked.append("end")), hangup_ends():
        signal.raise_signal(signal.SIGHUP)
    assert asked == ["end"] and signal.getsignal(signal.SIGHUP) == before


def test_a_hangup_that_is_ignored_stays_so():
    asked = []
    with handled(signal.SIGHUP, signal.SIG_IGN), handled(signal.SIGTERM, lambda *_: asked.append("end")), hangup_ends():
        signal.raise_signal(signal.SIGHUP)
    assert not asked


LISTENER = """
import signal, sys, time
from lightrft_visual.runtime.presence import handled, hangup_ends
asked = []
with handled(signal.SIGTERM, lambda *_: asked.append(1)), hangup_ends():
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    print("said to nobody", flush=True)
    open(sys.argv[1], "w").write("saved")
"""


def test_a_process_whose_terminal_closes_can_still_save(tmp_path):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(tmp_path / "done")],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        os.close(theirs)
        assert b"ready" in os.read(ours, 100)
        os.close(ours)
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0, errors
    assert (tmp_path / "done").read_text() == "saved"
