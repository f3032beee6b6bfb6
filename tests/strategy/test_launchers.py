"""What a launcher does with SIGTERM, by processes that stand for launchers and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import polls

from lightrft_visual.strategy.launchers import STARTED_BY, LauncherWatch, program

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, signal, sys, time
ended = []
if sys.argv[1] == "patient":
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
os.write(1, b"ready\\n")
while not ended:
    time.sleep(0.02)
"""
# Starts ranks as DeepSpeed's and torch's launchers do: a handler of its own that ends with code 1, then a wait.
STARTER = """
import os, signal, subprocess, sys
import lightrft_visual.strategy.launchers as launchers
launchers.attend()
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1], kind], env={**os.environ, "RANK": "0"})
         for kind in sys.argv[2:]]
signal.signal(signal.SIGTERM, lambda *_: ([rank.kill() for rank in ranks], sys.exit(1)))
sys.exit(max(rank.wait() for rank in ranks))
"""
FRONT = """
import subprocess, sys
import lightrft_visual.strategy.launchers as launchers
launchers.attend()
sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]]).wait())
"""


@pytest.fixture
def scripts(tmp_path) -> dict[str, Path]:
    """Files with the names of launchers."""
    found = {"torchrun": tmp_path / "torchrun", "deepspeed": tmp_path / "deepspeed", "other": tmp_path / "other.py"}
    for name, path in found.items():
        path.write_text(FRONT if name == "deepspeed" else STARTER)
    return found


def ended(command: list, ready: int) -> int:
    """The exit code of a command that gets SIGTERM when `ready` ranks are."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=subprocess.PIPE)
    family = []
    try:
        for _ in range(ready):
            assert process.stdout.readline() == b"ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        return process.wait(30)
    finally:
        process.kill()
        for each in family:
            if each.is_running():
                each.kill()
        process.stdout.close()


def test_ranks_that_handle_sigterm_are_waited_for(scripts):
    assert ended([scripts["torchrun"], RANK, "patient", "patient"], 2) == 0


def test_ranks_that_do_not_are_ended_as_ever(scripts):
    assert ended([scripts["torchrun"], RANK, "patient", "plain"], 2) == 1


def test_what_is_no_launcher_keeps_its_handler(scripts):
    assert ended([scripts["other"], RANK, "patient"], 1) == 1


def test_the_front_passes_the_signal_on(scripts):
    assert ended([scripts["deepspeed"], scripts["torchrun"], RANK, "patient"], 1) == 0


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
        "import pathlib, time\nfrom lightrft_visual.strategy.launchers import LauncherWatch\n"
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
    beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv(STARTED_BY, str(beside.pid))
    watch = LauncherWatch()
    assert not watch.gone()
    beside.kill()
    beside.wait()
    assert watch.gone() and LauncherWatch().gone()
    beside.stdin.close()


def test_without_a_launcher_there_is_nothing_to_watch():
    watch = LauncherWatch()
    assert not watch.launchers and not watch.gone()
