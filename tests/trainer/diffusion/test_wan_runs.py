"""Videos end to end: Flow-GRPO on a text-to-video model, Reward FL on a two-expert image-to-video one."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_families
import tiny_wan_parts
import torch
from forked import on_ranks
from PIL import Image

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.errors import RewardError
from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer

SIZE = "--height 32 --width 32 --num_frames 5 --guidance_scale 1 --max_sequence_length 5 --lora_rank 2"
BATCH = "--rollout_batch_size 2 --train_batch_size 4 --n_samples_per_prompt 2 --micro_rollout_batch_size 2"
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
    return None if rgb.std() < FLAT else numpy.array([[0.5, 0, 0], [0, 0.5, 0.0]])
"""


def trainer_of(folder: Path, pipeline: str, flags: str):
    argv = [
        "--pretrain", str(folder / pipeline), *SIZE.split(), *BATCH.split(), "--max_steps", "1",
        "--micro_train_batch_size", "2", "--learning_rate", "0.01", "--report", "false", "--eval_num_steps", "2",
        *flags.split(),
    ]  # fmt: skip
    return build_diffusion_trainer(load_config(DiffusionRunConfig, argv, preset=None))


def weights(trainer) -> dict[str, torch.Tensor]:
    """The LoRA weights of both experts, those that are frozen too; all weights without LoRA."""
    policy = trainer.parts.policy
    named, lora = policy.named_parameters(), policy.lora.rank > 0
    return {name: value.detach().clone() for name, value in named if "lora" in name or not lora}


def roll(folder: Path) -> str:
    """ROLL's block of settings on files as its example has them; two videos a step, each an update, in two rounds."""
    return (
        "--model_name wan2_2 --trainable_models dit2 --extra_inputs input_image --use_gradient_checkpointing_offload "
        f"--model_paths {folder}/paths.json --tokenizer_path {folder}/umt5-xxl --num_inference_steps 8 "
        "--max_timestep_boundary 1.0 --min_timestep_boundary 0.9 --per_device_train_batch_size 1 "
        "--gradient_accumulation_steps 1 --n_samples_per_prompt 1 --num_train_epochs 2 --lr_scheduler_type constant "
        "--mid_timestep 6 --final_timestep 7 --lora_target_modules q k v o"
    )


def train(folder: Path, pipeline: str, flags: str) -> dict[str, object]:
    trainer = trainer_of(folder, pipeline, flags)
    before = weights(trainer)
    error = None
    try:
        trainer.fit()
    except RewardError as failure:
        error = str(failure)
    trainer.close()
    after = weights(trainer)
    moved = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    adapted = sorted({name.split(".")[1] for name in before})
    return {"moved": sorted(moved), "adapted": adapted, "updates": trainer.updates, "error": error}


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
    (folder / "face.py").write_text(FACE.replace("FLAT", "1"))
    (folder / "no_face.py").write_text(FACE.replace("FLAT", "1000"))


def bright(folder: Path) -> str:
    return f"--reward_fn {folder}/bright.py:bright"


def reward_fl(folder: Path, detector: str = "face") -> str:
    settings = f"--differentiable_kwargs.embedder {folder}/face.py:build --differentiable_kwargs.size 16"
    return (
        "--diffusion_algorithm reward_fl --num_steps 4 --mid_timestep 0 --final_timestep 3 --warmup_steps 0 "
        f"--prompt_data {folder}/metadata.csv {bright(folder)} --differentiable_reward face_similarity "
        f"{settings} --differentiable_kwargs.detector {folder}/{detector}.py:find"
    )


def of_one_expert(folder: Path, text: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Runs that train the second expert, which serves two of the four stochastic steps."""
    second = f"{text} --sigmas 1,0.8,0.5,0.3,0.1 --trainable_models transformer_2"
    runs = {
        "second": "",
        "second_replayed": "--rollout_graph_gib 0 --micro_train_batch_size 1 --beta 0.1",
        "second_matched": "--diffusion_algorithm diffusion_nft --micro_train_batch_size 1",
        "second_window": "--sde_window_size 1 --sde_window_move slide",  # at a step of the other expert
        "both_high": "--sigmas 1,0.9,0.8,0.1 --trainable_models transformer,transformer_2 --l2 0.5 --lora_rank 0",
    }
    for name, flags in runs.items():
        yield name, train(folder, "wan_two_experts", f"{second} {flags} --output_dir {folder}/out_{name}")


def all_runs(folder: Path) -> None:
    prepare(folder)
    text = f"--prompt_data {folder}/prompts.jsonl --eval_data {folder}/prompts.jsonl --eval_split train --num_steps 3"
    first, out = reward_fl(folder), f"--output_dir {folder}/out"
    tiny_wan_parts.write_parts(folder)
    facts = {
        "text": train(folder, "wan", f"{text} {bright(folder)} {out}_text"),
        "high": train(folder, "wan_i2v", f"{first} --max_timestep_boundary 0.358 {out}_high"),
        "faceless": train(folder, "wan_i2v", f"{reward_fl(folder, 'no_face')} --l2 0 {out}_faceless"),
        "roll": train(
            folder, "wan_i2v", f"{first.replace(bright(folder), '')} {roll(folder)} {out}_roll"
        ),
    }  # fmt: skip
    scored = f"{text.replace('--num_steps 3', '')} {bright(folder)}"
    facts |= of_one_expert(folder, scored)
    (folder / "facts.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root):
    place = tmp_path_factory.mktemp("wan")
    on_ranks(all_runs, place, ranks=1, limit=280)
    return place


def facts(folder: Path, run: str) -> dict:
    return json.loads((folder / "facts.json").read_text())[run]


def last_row(folder: Path, run: str) -> dict[str, str]:
    with open(folder / f"out_{run}" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))[-1]


def test_evaluated_videos_are_a_strip_and_mp4_files(folder) -> None:
    sheets = folder / "out_text" / "eval_epoch_000001"
    assert Image.open(sheets / "contact_sheet.png").width > 300
    assert [path.name for path in sorted(sheets.glob("*.mp4"))] == ["video_000.mp4", "video_001.mp4"]
    assert (folder / "out_text" / "checkpoint-final").is_dir() and facts(folder, "text")["moved"] == ["transformer"]
    assert float(last_row(folder, "text")["ratio_max_dev_first"]) == 0.0


def test_only_the_expert_inside_the_boundaries_moves(folder) -> None:
    found = facts(folder, "high")
    assert (found["moved"], found["adapted"]) == (["transformer"], ["transformer", "transformer_2"])


@pytest.mark.parametrize("run", ["second", "second_replayed", "second_matched"])
def test_one_expert_trains_on_the_steps_that_it_serves(folder, run) -> None:
    found, row = facts(folder, run), last_row(folder, run)
    assert found["moved"] == found["adapted"] == ["transformer_2"] and found["updates"] == 1
    assert float(row["grad_norm"]) > 0 and float(row.get("ratio_max_dev_first") or 0.0) < 1e-6


def test_a_window_of_steps_that_the_other_expert_serves_gives_no_gradient(folder) -> None:
    assert float(last_row(folder, "second_window")["grad_norm"]) == 0.0


def test_an_expert_that_serves_no_trained_step_is_frozen(folder) -> None:
    assert facts(folder, "both_high")["moved"] == ["transformer"]  # no weight decay moves the other


def test_the_settings_of_roll_train_the_low_noise_expert_in_rounds_of_updates(folder) -> None:
    found = facts(folder, "roll")
    assert found["moved"] == found["adapted"] == ["transformer_2"]
    assert found["updates"] == 4  # two samples, one an update, two rounds (num_train_epochs)


def test_faces_are_scored_against_the_first_frame_of_the_csv(folder) -> None:
    row = last_row(folder, "high")
    assert -1 <= float(row["reward_mean"]) <= 1 and float(row["invalid_share"]) == 0.0


def test_a_step_without_any_face_ends_the_run_and_moves_nothing(folder) -> None:
    found = facts(folder, "faceless")
    assert found["error"].startswith("step 1: 100% of the samples are invalid") and found["moved"] == []
    assert all(facts(folder, run)["error"] is None for run in ("text", "high", "roll"))
