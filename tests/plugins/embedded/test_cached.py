"""What is built at its first use: once among processes, whole or not at all, without a trace in the run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import output_of

from lightrft_visual.plugins.embedded.cached import built_once

PROJECT = Path(__file__).resolve().parents[3]
RACER = """
import sys, time
from pathlib import Path
from lightrft_visual.plugins.embedded.cached import built_once

def build(folder):
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    folder.mkdir()

built_once(Path(sys.argv[1], "raced"), build)
"""


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_of_processes_that_race_one_builds_and_the_others_wait(tmp_path):
    counter = tmp_path / "count"
    command = [sys.executable, "-c", RACER, str(tmp_path / "cache"), str(counter)]
    racers = [subprocess.Popen(command, cwd=PROJECT) for _ in range(2)]
    for racer in racers:
        output_of(racer, 400)
    assert [racer.returncode for racer in racers] == [0, 0]
    assert counter.read_text() == "built\n" and visible(tmp_path / "cache") == ["raced"]


def test_what_fails_leaves_nothing_and_what_another_host_built_stays(tmp_path):
    def fails(path):
        path.mkdir()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        built_once(tmp_path / "model", fails)
    assert not visible(tmp_path) and not list(tmp_path.glob(".building-*"))

    def beaten(path):
        path.mkdir()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    assert visible(built_once(tmp_path / "model", beaten)) == ["theirs"]


def test_a_model_that_is_built_takes_no_random_numbers_from_the_run(tmp_path):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    built_once(tmp_path / "model", lambda folder: (folder.mkdir(), torch.rand(7)))
    assert torch.equal(torch.rand(3), wanted)
