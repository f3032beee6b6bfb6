"""A second run into the folder of one that is still going is refused, and the first loses nothing."""

import os
from pathlib import Path

import forked
import pytest
from waiting import polls
from whole_runs import EXAMPLE, rows

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
def start(tmp_path, cache_root):
    """Starts a run into `tmp_path/run` in a process of its own, with this as GO_ON; its output is in NAME.txt."""
    (tmp_path / "mine.py").write_text(REWARD)
    own = [*FLAGS, "--output_dir", str(tmp_path / "run"), "--reward_fn", f"{tmp_path}/mine.py:score"]
    begun = []

    def process(name: str, go_on: Path):
        environment = {**os.environ, "WAITING": str(tmp_path / "waiting"), "GO_ON": str(go_on)}
        arguments = (str(EXAMPLE), own, environment, str(tmp_path / f"{name}.txt"))
        begun.append(forked.server().Process(target=forked.run_script, args=arguments))
        begun[-1].start()
        return begun[-1]

    yield process
    forked.end(begun)


def test_second_run_into_a_live_folder_is_refused_and_the_first_goes_on(start, tmp_path):
    first, run = start("first", tmp_path / "go_on"), tmp_path / "run"
    for _ in polls(LIMIT):
        if (tmp_path / "waiting").exists() or first.exitcode is not None:
            break
    before = sorted(os.listdir(run))
    second = start("second", tmp_path)
    second.join(LIMIT)
    after = sorted(os.listdir(run))
    (tmp_path / "go_on").touch()
    first.join(LIMIT)
    assert first.exitcode == 0, (tmp_path / "first.txt").read_text()[-3000:]
    told = (tmp_path / "second.txt").read_text()
    assert second.exitcode == 1 and "Traceback" not in told and "loading the models" not in told
    refused = f"error: FolderInUse: output_dir {run} belongs to a run that is still going: process {first.pid} on"
    assert refused in told, told[-3000:]
    assert before == after and "checkpoint-000001" in before and not {"earlier_runs", "crash.log"} & {*after}
    assert [row["step"] for row in rows(run)] == [1, 2] and "run.lock" not in os.listdir(run)
