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


def test_embedded_model_trains_several_times_in_a_process_and_its_checkpoints_evaluate(tmp_path):
    pytest.importorskip("vllm")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "a numbered checkpoint"
