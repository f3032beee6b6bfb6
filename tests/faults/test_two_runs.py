"""A second run into the folder of one that is still going is refused, and the first loses nothing."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import finished, output_of, polls

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "train_grpo_vl.py")]
FLAGS = (
    "--engine_type hf --rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 8 "
    "--train_batch_size 8 --micro_train_batch_size 8 --max_eval_samples 0 --report false --max_steps 2 "
    "--save_steps 1 --parity_every 0 --zero_stage 0 --max_samples 64"
).split()
# Its second call waits, so that the first step, and its checkpoint, are done.
REWARD = """
import os, time
from pathlib import Path

calls = 0

def score(completions):
    global calls
    calls += 1
    if calls == 2:
        Path(os.environ["WAITING"]).touch()
        while not Path(os.environ["GO_ON"]).exists():
            time.sleep(0.1)
    return [float(len(text) % 3) for text in completions]
"""
LIMIT = 300.0


@pytest.fixture
def run(tmp_path, cache_root):
    """The command of a run into `tmp_path/run`, and its environment."""
    (tmp_path / "mine.py").write_text(REWARD)
    files = {"WAITING": tmp_path / "waiting", "GO_ON": tmp_path / "go_on"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(path) for name, path in files.items()}}
    own = ["--output_dir", str(tmp_path / "run"), "--reward_fn", f"{tmp_path}/mine.py:score"]
    return [*COMMAND, *FLAGS, *own], environment


def test_second_run_into_a_live_folder_is_refused_and_the_first_goes_on(run, tmp_path):
    command, environment = run
    first = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    try:
        for _ in polls(LIMIT):
            if (tmp_path / "waiting").exists() or first.poll() is not None:
                break
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        second = finished(command, LIMIT, env={**environment, "GO_ON": str(tmp_path)}, cwd=tmp_path)
        after = sorted(path.name for path in (tmp_path / "run").iterdir())
        (tmp_path / "go_on").touch()
        told, _ = output_of(first, LIMIT)
    finally:
        first.kill()
    assert first.returncode == 0, told[-3000:]
    assert second.returncode == 1 and "Traceback" not in second.stderr
    refused = (
        rf"error: FolderInUse: output_dir {tmp_path}/run belongs to a run that is still going: process {first.pid} on"
    )
    assert re.search(refused, second.stderr), second.stderr[-3000:]
    assert "loading the models" not in second.stdout + second.stderr
    assert before == after and "checkpoint-000001" in before and not {"earlier_runs", "crash.log"} & {*after}
    assert steps(tmp_path / "run") == ["1", "2"]
    assert "run.lock" not in os.listdir(tmp_path / "run")


def steps(folder: Path) -> list[str]:
    with open(folder / "metrics.csv", newline="") as file:
        return [row["step"] for row in csv.DictReader(file)]
