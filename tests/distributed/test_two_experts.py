"""A model of two experts on two ranks trains as on one, under ZeRO 0, 2 and 3, though the ranks' steps differ."""

import json
from pathlib import Path

import pytest
import tiny_families
import torch
from whole_runs import ROOT, rows, run_plan

DRIVER = ROOT / "tests" / "distributed" / "run_drawing.py"
# Four steps of which two lie on either side of the boundary; each sample is trained on two of its own, so that one rank
# may need an expert that the other does not.
BASE = (
    "--height 32 --width 32 --num_frames 5 --num_steps 5 --eval_num_steps 2 --guidance_scale 2 --guidance_scale_2 4 "
    "--max_sequence_length 5 --rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 2 "
    "--train_batch_size 4 --micro_train_batch_size 1 --lora_rank 2 --learning_rate 1e-2 --report false --max_steps 2 "
    "--sigmas 1,0.8,0.5,0.3,0.1 --timestep_fraction 0.5 --timestep_choice random"
)
BRIGHT = """
import numpy

def bright(frames):
    return [float(numpy.mean([numpy.asarray(frame) for frame in clip])) / 255 for clip in frames]
"""
ONCE = ["--max_steps", "1", "--collective_timeout", "60"]
SECOND = ["--trainable_models", "transformer_2", "--train_batch_size", "8", *ONCE]
TOGETHER = ["--zero_stage", "2", "--steps_per_forward", "2", *ONCE]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(0)
    tiny_families.wan_two_experts().save_pretrained(folder / "pipeline")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a red circle", "a blue cross")))
    (folder / "bright.py").write_text(BRIGHT)
    given = {"pretrain": folder / "pipeline", "prompt_data": prompts, "reward_fn": f"{folder}/bright.py:bright"}
    return ["diffusion", *BASE.split(), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache_root, given) -> Path:
    runs = {"flow": given, "together": [*given, *TOGETHER], "second": [*given, *SECOND]}
    return run_plan(runs, tmp_path_factory.mktemp("one"), cache_root, 1, driver=DRIVER)


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache_root, given) -> Path:
    under_3 = [*given, "--zero_stage", "3"]
    runs = {"flow": under_3, "together": [*given, *TOGETHER], "second": [*given, *SECOND, "--zero_stage", "0"]}
    runs["bf16"] = [*under_3, *"--bf16 true --enable_ema true --ema_interval 1".split()]
    return run_plan(runs, tmp_path_factory.mktemp("two"), cache_root, 2, driver=DRIVER)


@pytest.mark.parametrize("name", ["flow", "together", "second"])
def test_two_ranks_train_both_experts_or_the_second_like_one(one, two, name):
    """In `together` a forward takes both steps of a sample, where one expert serves them."""
    ours, theirs = rows(one / name), rows(two / name)
    assert len(ours) == len(theirs) == (2 if name == "flow" else 1)
    for mine, other in zip(ours, theirs):
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3) and mine["grad_norm"] > 0
        assert all(abs(mine[name] - other[name]) < 1e-5 for name in ("loss", "reward_mean", "reward_std"))


def test_what_diffusers_keeps_in_fp32_stays_so_in_a_bf16_run_and_its_weights_come_back(two):
    kept, cast = ("time_embedder", "scale_shift_table", "norm2"), ("attn1.to_q", "ffn", "proj_out")
    for rank in (0, 1):
        facts = json.loads((two / "bf16" / f"facts_rank{rank}.json").read_text())
        assert all(any(part in name for name in facts["fp32"]) for part in kept)
        assert not any(part in name for name in facts["fp32"] for part in cast)
        for swap in facts["swaps"].values():
            assert swap["weights_back"] and swap["velocity_back"] and swap["difference"] > 0
    assert all(0 < row["grad_norm"] < 1e3 for row in rows(two / "bf16"))
