"""Videos end to end: Flow-GRPO on a text-to-video model, Reward FL on a two-expert image-to-video one."""

import csv
from pathlib import Path

import pytest
import tiny_families
import tiny_wan_parts
import torch
from drawing_runs import facts, rows, run_all
from forked import on_ranks
from PIL import Image

BASE = (
    "--height 32 --width 32 --num_frames 5 --guidance_scale 1 --max_sequence_length 5 --lora_rank 2 "
    "--rollout_batch_size 2 --train_batch_size 4 --n_samples_per_prompt 2 --micro_rollout_batch_size 2 --max_steps 1 "
    "--micro_train_batch_size 2 --learning_rate 0.01 --report false --eval_num_steps 2"
)
BRIGHT = """
import numpy

def bright(frames):
    return [float(numpy.mean([numpy.asarray(frame) for frame in clip])) / 255 for clip in frames]
"""
FACE = """
import torch

class Embedder(torch.nn.Module):
    def forward(self, pixels):
        return torch.nn.functional.avg_pool2d(pixels, 4).flatten(1)

def build():
    return Embedder()

def find(rgb):
    import numpy
    return numpy.array([[0.5, 0, 0], [0, 0.5, 0.0]])
"""
TEXT = "--prompt_data {folder}/prompts.jsonl --eval_data {folder}/prompts.jsonl --eval_split train"
BRIGHT_FLAG = "--reward_fn {folder}/bright.py:bright"
REWARD_FL = (
    "--diffusion_algorithm reward_fl --num_steps 4 --mid_timestep 0 --final_timestep 3 --warmup_steps 0 "
    "--prompt_data {folder}/metadata.csv --differentiable_reward face_similarity "
    "--differentiable_kwargs.embedder {folder}/face.py:build --differentiable_kwargs.size 16 "
    "--differentiable_kwargs.detector {folder}/face.py:find"
)
# ROLL's block of settings on files as its example has them; two videos a step, each an update, in two rounds.
ROLL = (
    "--model_name wan2_2 --trainable_models dit2 --extra_inputs input_image --use_gradient_checkpointing_offload "
    "--model_paths {folder}/paths.json --tokenizer_path {folder}/umt5-xxl --num_inference_steps 8 "
    "--max_timestep_boundary 1.0 --min_timestep_boundary 0.9 --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 1 --n_samples_per_prompt 1 --num_train_epochs 2 --lr_scheduler_type constant "
    "--mid_timestep 6 --final_timestep 7 --lora_target_modules q k v o"
)
TWO_EXPERTS = f"--pretrain {{folder}}/wan_two_experts {TEXT} {BRIGHT_FLAG}"
# The second expert serves two of the four stochastic steps.
SECOND = f"{TWO_EXPERTS} --sigmas 1,0.8,0.5,0.3,0.1 --trainable_models transformer_2"
RUNS = {
    "text": f"--pretrain {{folder}}/wan {TEXT} {BRIGHT_FLAG} --num_steps 3",
    "high": f"--pretrain {{folder}}/wan_i2v {REWARD_FL} {BRIGHT_FLAG} --max_timestep_boundary 0.358",
    "roll": f"--pretrain {{folder}}/wan_i2v {REWARD_FL} {ROLL}",
    "second": SECOND,
    "second_replayed": f"{SECOND} --rollout_graph_gib 0 --micro_train_batch_size 1 --beta 0.1",
    "second_matched": f"{SECOND} --diffusion_algorithm diffusion_nft --micro_train_batch_size 1",
    "second_window": f"{SECOND} --sde_window_size 1 --sde_window_move slide",  # at a step of the other expert
    "both_high": f"{TWO_EXPERTS} --sigmas 1,0.9,0.8,0.1 --trainable_models transformer,transformer_2 --l2 0.5 "
    "--lora_rank 0",
}


def prepare(folder: Path) -> None:
    for name in ("wan", "wan_i2v", "wan_two_experts"):
        torch.manual_seed(0)
        tiny_families.FAMILIES[name]().save_pretrained(folder / name)
    (folder / "prompts.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": "a blue cross"}\n')
    with open(folder / "metadata.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["video", "prompt", "input_image"])
        for place, colour in enumerate(("red", "blue")):
            picture = Image.new("RGB", (40, 40), colour)
            picture.paste((255, 255, 255), (0, 0, 20, 20))
            picture.save(folder / f"frame_{place}.png")
            rows.writerow([f"clip_{place}.mp4", f"a {colour} circle", f"frame_{place}.png"])
    (folder / "bright.py").write_text(BRIGHT)
    (folder / "face.py").write_text(FACE)


def all_runs(folder: Path) -> None:
    prepare(folder)
    tiny_wan_parts.write_parts(folder)
    run_all(folder, BASE, RUNS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root):
    place = tmp_path_factory.mktemp("wan")
    on_ranks(all_runs, place, ranks=1, limit=280)
    return place


def ran(folder: Path, run: str) -> tuple[dict, dict[str, str]]:
    """(what a run left, the last row of its metrics)."""
    return facts(folder, run), rows(folder, run)[-1]


def test_evaluated_videos_are_a_strip_and_mp4_files(folder) -> None:
    sheets, (found, row) = folder / "text" / "eval_epoch_000001", ran(folder, "text")
    assert Image.open(sheets / "contact_sheet.png").width > 300
    assert [path.name for path in sorted(sheets.glob("*.mp4"))] == ["video_000.mp4", "video_001.mp4"]
    assert (folder / "text" / "checkpoint-final").is_dir() and found["moved"] == ["transformer"]
    assert float(row["ratio_max_dev_first"]) == 0.0


def test_only_the_expert_inside_the_boundaries_or_that_serves_a_trained_step_moves(folder) -> None:
    found, row = ran(folder, "high")
    assert (found["moved"], found["adapted"]) == (["transformer"], ["transformer", "transformer_2"])
    # faces, scored against the first frame of the csv
    assert -1 <= float(row["reward_mean"]) <= 1 and float(row["reward_invalid_share"]) == 0.0
    assert ran(folder, "both_high")[0]["moved"] == ["transformer"]  # no weight decay moves the other
    found, _ = ran(folder, "roll")
    assert found["moved"] == found["adapted"] == ["transformer_2"]
    assert found["updates"] == 4  # two samples, one an update, two rounds (num_train_epochs)


@pytest.mark.parametrize("run", ["second", "second_replayed", "second_matched"])
def test_one_expert_trains_on_the_steps_that_it_serves(folder, run) -> None:
    found, row = ran(folder, run)
    assert found["moved"] == found["adapted"] == ["transformer_2"] and found["updates"] == 1
    assert float(row["grad_norm"]) > 0 and float(row.get("ratio_max_dev_first") or 0.0) < 1e-6
    assert float(ran(folder, "second_window")[1]["grad_norm"]) == 0.0
