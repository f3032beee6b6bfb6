"""The embedded model from Python: several runs in one process, and what their checkpoints do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
from lightrft_visual import GRPOTrainer, evaluate, sample

rows = [{"prompt": "how many shapes?", "reference": "1"}, {"prompt": "what colour is it?", "reference": "red"}]
for number, engine in enumerate(("vllm", "vllm", "hf")):
    result = GRPOTrainer(
        "embedded", "exact", rows, rows, engine_type=engine, rollout_batch_size=2, n_samples_per_prompt=2,
        train_batch_size=4, generate_max_len=4, max_steps=1, save_steps=1, image_dependence_every=0,
        output_dir=f"{sys.argv[1]}/run {number}",
    ).fit()
    assert result.metrics["step"] == 1
print("one after the other")
numbered = result.output_dir / "checkpoint-000001"
assert evaluate(numbered, reward_funcs="exact", eval_dataset=rows)["eval_reward"] == result.metrics["eval_reward"]
asked = dict(prompts=["how many shapes?"], temperature=0)
assert sample(numbered, **asked) == sample(result.checkpoint, **asked)
print("a numbered checkpoint")
"""


def said_by(program: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_embedded_model_trains_several_times_in_a_process_and_its_checkpoints_evaluate(tmp_path):
    pytest.importorskip("vllm")
    assert said_by(PROGRAM, tmp_path) == "a numbered checkpoint"


BROKEN = """
import sys
from lightrft_visual import GRPOTrainer
from lightrft_visual.errors import ConfigError

def fit(callbacks):
    return GRPOTrainer(
        "embedded", "exact", [{"prompt": "how many shapes?", "reference": "1"}], callbacks=callbacks, engine_type="hf",
        n_samples_per_prompt=2, generate_max_len=4, max_steps=1, image_dependence_every=0, output_dir=sys.argv[1],
    ).fit()

class Misspelled:
    def on_metric(self, metrics):
        pass

try:
    fit([Misspelled()])
except ConfigError as error:
    kept = error  # as a notebook keeps the last one
assert "no hook is Misspelled" in str(kept)
assert fit([]).metrics["step"] == 1
print("the folder is free")
"""


def test_start_that_fails_at_a_hook_lets_go_of_its_folder(tmp_path):
    assert said_by(BROKEN, tmp_path) == "the folder is free"
