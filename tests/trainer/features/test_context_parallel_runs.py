"""Whole runs whose ranks share each denoiser forward train as one rank does."""

import json
from pathlib import Path

import pytest
from small_pipeline import given_flags
from whole_runs import ROOT, rows, run_plan

from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline

DRIVER = ROOT / "tests" / "distributed" / "run_drawing.py"
BASE = (
    "--height 32 --width 32 --num_steps 4 --guidance_scale 2 --max_sequence_length 5 --rollout_batch_size 2 "
    "--n_samples_per_prompt 4 --micro_rollout_batch_size 2 --train_batch_size 4 --micro_train_batch_size 2 "
    "--steps_per_forward 2 --max_steps 1 --max_eval_samples 0 --lora_rank 3 --learning_rate 1e-2 --report false "
    "--beta 0.1"
)
SHARED = "--sp_size 2 --zero_stage 3 --gradient_checkpointing true"
NAMES = ("loss", "reward_mean", "reward_std", "ratio_mean", "kl", "clip_frac", "reward_invalid_share")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache_root) -> tuple[Path, Path]:
    """On one rank, and on four of which each two share forwards."""
    given = tmp_path_factory.mktemp("given")
    flags = ["diffusion", *BASE.split(), *given_flags(given)]
    build_pipeline(TinyDiffusionSettings(layers=1, heads=4)).save_pretrained(given / "pipeline")
    one, four = ({"run": [*flags, *own.split()]} for own in ("", SHARED))
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("four")
    run_plan(one, folders[0], cache_root, 1, driver=DRIVER)
    run_plan(four, folders[1], cache_root, 4, driver=DRIVER)
    return folders[0] / "run", folders[1] / "run"


def test_ranks_that_share_forwards_train_like_one(runs):
    ours, theirs = map(rows, runs)
    (mine,), (other,) = ours, theirs  # of two updates
    assert all(abs(mine[name] - other[name]) < 1e-5 for name in NAMES)
    assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4) and mine["grad_norm"] > 0


def test_each_rank_draws_samples_of_its_own(runs):
    facts = [json.loads(path.read_text()) for path in sorted(runs[1].glob("facts_rank*.json"))]
    assert [each["updates"] for each in facts] == [2] * 4
    assert sorted(int(sample) for each in facts for sample in each["advantages"]) == list(range(8))
