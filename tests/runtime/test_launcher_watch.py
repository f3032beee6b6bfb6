"""A rank notices that its launcher is gone; a terminal that is lost ends a run as SIGTERM does."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import polls

from lightrft_visual.runtime.presence import STARTED_BY, LauncherWatch, handled, hangup_ends, program

ROOT = Path(__file__).resolve().parents[2]
FRONT = "import subprocess, sys; sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]]).wait())"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python /venv/bin/deepspeed --num_gpus 2 train.py", "deepspeed"),
        ("python -u -m deepspeed.launcher.launch --world_info=x train.py", "deepspeed.launcher.launch"),
        ("python -X dev -W ignore /venv/bin/torchrun train.py", "torchrun"),
        ("python train.py torchrun", "train.py"),
        ("python", ""),
    ],
)
def test_the_program_of_a_command_line(command, name):
    assert program(command.split()) == name


def test_a_launcher_that_has_gone_is_noticed(tmp_path):
    """The launcher is killed; its rank, which it started, sees that nobody is above it any more."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import pathlib, time\nfrom lightrft_visual.runtime.presence import LauncherWatch\n"
        "watch = LauncherWatch()\nassert len(watch.launchers) == 1 and not watch.gone()\nprint('ready', flush=True)\n"
        "while not watch.gone():\n    time.sleep(0.02)\npathlib.Path(__file__).with_suffix('.seen').touch()\n"
    )
    front = tmp_path / "deepspeed"
    front.write_text(FRONT)
    process = subprocess.Popen(
        [sys.executable, str(front), str(rank)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait(30)
    assert any(rank.with_suffix(".seen").exists() for _ in polls(30, 0.05))
    process.stdout.close()


def test_a_rank_is_told_which_process_stands_for_its_launcher(monkeypatch):
    """Workers of Ray have names of their own. One that is gone before its rank has imported everything counts too."""
    alone = LauncherWatch()
    assert not alone.launchers and not alone.gone()
    beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv(STARTED_BY, str(beside.pid))
    watch = LauncherWatch()
    assert not watch.gone()
    beside.kill()
    beside.wait()
    assert watch.gone() and LauncherWatch().gone()
    beside.stdin.close()


def test_a_hangup_asks_whoever_listens_for_the_end_unless_it_is_ignored():
    asked, before = [], signal.getsignal(signal.SIGHUP)
    with handled(signal.SIGTERM, lambda *_: asked.append("end")):
        with hangup_ends():
            signal.raise_signal(signal.SIGHUP)
        assert asked == ["end"] and signal.getsignal(signal.SIGHUP) == before
        with handled(signal.SIGHUP, signal.SIG_IGN), hangup_ends():
            signal.raise_signal(signal.SIGHUP)
    assert asked == ["end"]


LISTENER = """
import fcntl, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
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
    ) as process:  # fmt: skip
        os.close(theirs)
        assert b"ready" in os.read(ours, 100)
        os.close(ours)
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0, errors
    assert (tmp_path / "done").read_text() == "saved"
