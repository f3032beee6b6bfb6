"""What is built at its first use: once among processes, whole or not at all, without a trace in the run."""

import os
from pathlib import Path

import pytest
import torch
from forked import run_together

from lightrft_visual.plugins.embedded.cached import built_once

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


@pytest.mark.slow
def test_of_processes_that_race_one_builds_and_the_others_wait(tmp_path):
    counter, script = tmp_path / "count", tmp_path / "racer.py"
    script.write_text(RACER)
    run_together(script, [str(tmp_path / "cache"), str(counter)], [dict(os.environ)] * 2, limit=400)
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
