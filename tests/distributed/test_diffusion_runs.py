"""Diffusion runs: one rank and two agree under every ZeRO stage, a resumed run goes on bit for bit, copies of the
weights are lent and given back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small_edits import given_edits
from small_pipeline import given_flags
from whole_runs import ROOT, rows, run_plan

DRIVER = ROOT / "tests" / "distributed" / "run_drawing.py"
BASE = (
    "--height 32 --width 32 --num_steps 3 --eval_num_steps 3 --guidance_scale 2 --max_sequence_length 5 "
    "--rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 2 --train_batch_size 4 "
    "--micro_train_batch_size 2 --max_eval_samples 3 --lora_rank 4 --learning_rate 1e-2 --report false "
    "--num_trajectories_to_save 8"
)
REWARD_FL = (
    "--diffusion_algorithm reward_fl --differentiable_reward shape_match --mid_timestep 1 --final_timestep 2 "
    "--micro_train_batch_size 2 --warmup_steps 0 "
    "--max_epochs 2 --learning_rate 1e-3"  # Adam takes whole steps of gradients near zero, which rounding decides
)
RUNS = {
    "flow": "--enable_ema true --ema_interval 1 --eval_ema true --beta 0.1 --save_steps 1 --eval_steps 1",
    "full": "--max_steps 2 --lora_rank 0 --learning_rate 1e-3 --beta 0.1",
    "nft": "--diffusion_algorithm diffusion_nft --guidance_scale 1 --save_steps 1 --eval_steps 1 --decay_type 1",
    "dgpo": "--diffusion_algorithm dgpo --guidance_scale 1 --dpo_reference old --beta 0.1 --max_steps 2",
    "pairs": "--diffusion_algorithm diffusion_dpo --prompt_data {pairs} --pair_data {pairs} --n_samples_per_prompt 2 "
    "--dpo_beta 50 --save_steps 1 --eval_steps 1",
    "edit": "--pretrain {edits}/pipeline --prompt_data {edits}/edits.jsonl --eval_data {edits}/edits.jsonl "
    "--source_pixels 1024 --max_sequence_length null --max_steps 1",
    "ltx2": "--pretrain {edits}/ltx2 --num_frames 9 --max_steps 1 --reward_fn {edits}/first.py:red --height 64 "
    "--width 64 --max_sequence_length 16 --gradient_checkpointing",
    "reward_fl": f"{REWARD_FL} --max_steps 2",
}


def with_resume(name: str, flags: str) -> dict[str, str]:
    """A run of two steps; and a copy of it as it was after the first, which is resumed and goes on."""
    return {
        name: f"{flags} --max_steps 2",
        f"{name}_resumed": f"copy:{name}@1 {flags} --max_steps 2 --resume_from auto",
    }


FLAGS = {
    1: {
        "flow": f"{RUNS['flow']} --max_steps 2",
        "unwatched": f"{RUNS['flow']} --max_steps 2 --eval_steps -1 --save_steps -1",
        "nft": f"{RUNS['nft']} --max_steps 2",
        **with_resume("pairs", RUNS["pairs"]),
        **{name: RUNS[name] for name in ("full", "dgpo", "reward_fl", "edit", "ltx2")},
    },
    2: {
        "flow_3": f"{RUNS['flow']} --max_steps 2 --zero_stage 3",
        **with_resume("nft_3", f"{RUNS['nft']} --zero_stage 3"),
        "pairs_1": f"{RUNS['pairs']} --max_steps 2 --zero_stage 1",
        **{f"{name}_2": RUNS[name] for name in ("dgpo", "reward_fl")},
        **{f"{name}_3": f"{RUNS[name]} --zero_stage 3" for name in ("full", "edit", "ltx2")},
    },
}
PAIRS = [(name.rpartition("_")[0], name) for name in FLAGS[2] if not name.endswith("resumed")]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A folder with a pipeline of fresh weights, its prompts and pairs and a user's reward, and models that edit."""
    folder = tmp_path_factory.mktemp("given")
    given_edits(folder)
    return folder


def launched(ranks: int, given: Path, folder: Path, cache: Path) -> Path:
    runs, first = {}, ["diffusion", *BASE.split(), *given_flags(given)]
    for name, flags in FLAGS[ranks].items():
        words = flags.format(pairs=given / "pairs.jsonl", edits=given / "given_edits").split()
        copies = [word for word in words if word.startswith("copy:")]
        runs[name] = [*copies, *first, *(word for word in words if word not in copies)]
    return run_plan(runs, folder, cache, ranks, driver=DRIVER)


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache_root, given) -> Path:
    return launched(1, given, tmp_path_factory.mktemp("one"), cache_root)


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache_root, given) -> Path:
    return launched(2, given, tmp_path_factory.mktemp("two"), cache_root)


def facts(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("facts_rank*.json"))]


def advantages(folder: Path) -> dict[str, list[float]]:
    """Of every sample of every step, all ranks together."""
    return {sample: values for rank in facts(folder) for sample, values in rank["advantages"].items()}


def sheets(folder: Path) -> list[np.ndarray]:
    paths = sorted(folder.glob("eval_epoch_*/contact_sheet.png"))
    assert paths
    return [np.asarray(Image.open(path).convert("RGB"), dtype=np.int16) for path in paths]


def final_weights(folder: Path) -> dict:
    final = folder / "checkpoint-final"
    lora = final / "pytorch_lora_weights.safetensors"
    return load_file(lora if lora.is_file() else final / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("left,right", PAIRS)
def test_two_ranks_train_and_evaluate_like_one_and_share_the_states(one, two, left, right):
    one, two = one / left, two / right
    ours, theirs = rows(one), rows(two)
    assert len(ours) == len(theirs) == (1 if left in ("edit", "ltx2") else 2) and len(facts(two)) == 2
    for mine, other in zip(ours, theirs):
        names = ("loss",) if left == "pairs" else ("loss", "reward_mean", "reward_std")  # pairs have no rewards
        assert all(abs(mine[name] - other[name]) < 1e-5 for name in names)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3) and mine["grad_norm"] > 0
    mine, other = advantages(one), advantages(two)
    assert mine.keys() == other.keys()
    for sample, values in mine.items():
        assert values == pytest.approx(other[sample], abs=2e-3)
        assert values[0] == pytest.approx(other[sample][0], abs=1e-5)
    for mine, other in zip(sheets(one), sheets(two), strict=True):
        apart = np.abs(mine - other)  # a value that lay between two levels of 255; a sheet is scaled, which may add two
        assert apart.max() <= 2 and (apart > 0).mean() < 1e-3
    evals = zip(rows(one, "eval_metrics.csv"), rows(two, "eval_metrics.csv"), strict=True)
    assert all(abs(mine["eval_reward"] - other["eval_reward"]) < 1e-4 for mine, other in evals)
    ours, theirs = final_weights(one), final_weights(two)
    assert ours.keys() == theirs.keys()
    # on the mean: Adam makes a whole step of a gradient that is nearly zero, whatever its sign
    assert max((ours[name] - theirs[name]).abs().mean().item() for name in ours) < 1e-4
    whole = facts(one)[0]
    for rank in facts(two):
        assert rank["optimizer_elements"] < 0.6 * whole["optimizer_elements"]
        if right.endswith("_3"):  # also the copies of the weights are divided
            assert all(rank["copied_elements"][name] < 0.6 * n for name, n in whole["copied_elements"].items())
    assert whole["copied_elements"] or left not in ("flow", "full", "nft")


@pytest.mark.parametrize("where,name", (("one", "flow"), ("two", "flow_3")))
def test_checkpoints_hold_what_trains_and_no_frozen_base(request, where, name):
    files = list((request.getfixturevalue(where) / name).glob("checkpoint-*/**/*model_states.pt"))
    assert files
    for file in files:
        stored = torch.load(file, map_location="cpu", weights_only=False)
        held = [key for key in stored["module"] if "pos_embed.pos_embed" not in key]  # a buffer
        assert held and all("lora_" in key for key in held) and not stored.get("frozen_param_fragments")


@pytest.mark.parametrize("where,ranks", [("one", 1), ("two", 2)])
def test_copies_are_lent_and_weights_come_back(request, where, ranks):
    for name in FLAGS[ranks]:
        for rank in facts(request.getfixturevalue(where) / name):
            for kind, swap in rank["swaps"].items():
                assert swap["weights_back"] and swap["velocity_back"], (name, kind)
                assert swap["difference"] > 0 or kind == "old", name  # old follows closely, and may have caught up


@pytest.mark.parametrize("where,name", [("one", "pairs"), ("two", "nft_3")])
def test_a_resumed_run_goes_on_bit_for_bit(request, where, name):
    folder = request.getfixturevalue(where)
    whole, resumed = folder / name, folder / f"{name}_resumed"
    assert rows(whole) == rows(resumed) and len(rows(whole)) == 2
    assert rows(whole, "eval_metrics.csv") == rows(resumed, "eval_metrics.csv")
    ours, theirs = final_weights(whole), final_weights(resumed)
    assert all((ours[key] == theirs[key]).all() for key in ours)


def test_the_first_update_starts_at_ratio_one_and_training_is_as_it_is_unwatched(one, two):
    for folder in (one / "flow", one / "full", two / "flow_3", two / "full_3"):
        assert all(row["ratio_max_dev_first"] <= 1e-5 for row in rows(folder)), folder
    assert rows(one / "flow") == rows(one / "unwatched")  # without evaluations by EMA, and without saving
    for rank in (*facts(one / "reward_fl"), *facts(two / "reward_fl_2")):
        assert rank["updates"] == 2 * 2 * 2  # steps, epochs, and train batches of 4 in 8 samples
