"""Runs of a tiny SD3 pipeline in a process of their own: `picture_runs.py FOLDER`, see `drawing_runs`."""

import json
import shutil
import sys
from pathlib import Path

from drawing_runs import run_all
from safetensors.torch import load_file, save_file

from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline

BASE = (
    "--pretrain {folder}/pipeline --prompt_data {folder}/prompts.jsonl --eval_data {folder}/prompts.jsonl "
    "--height 32 --width 32 --num_steps 3 --eval_num_steps 3 --guidance_scale 1 --max_sequence_length 5 "
    "--rollout_batch_size 2 --n_samples_per_prompt 4 --micro_rollout_batch_size 4 --train_batch_size 8 "
    "--micro_train_batch_size 4 --lora_rank 4 --learning_rate 2e-2 --report false --max_steps 2 --eval_steps 1"
)
SCORES = """
calls = []

def red(images, prompts, metadata, ids):
    calls.append(ids)
    assert [row["note"] for row in metadata] == [prompt.upper() for prompt in prompts]
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

def some(images, prompts):
    return [None if index % 4 == 0 else image.resize((1, 1)).getpixel((0, 0))[0] / 255
            for index, image in enumerate(images)]

counts = {"rising": 0, "falling": 0}

def rising(images):
    counts["rising"] += 1
    return [counts["rising"] + index / 100 for index in range(len(images))]

def falling(images):
    counts["falling"] += 1
    return [1 / counts["falling"]] * len(images)

def smooth(media, prompts, metadata, valid=1):
    scores = -(media[..., 1:] - media[..., :-1]).square().flatten(1).mean(dim=1)
    return scores, scores.isfinite() & (media.new_tensor([index % 4 < valid for index in range(len(media))]) > 0)

def smooth_nowhere(media, prompts, metadata):
    return smooth(media, prompts, metadata, valid=0)

def flat(media, prompts, metadata):
    return smooth(media.detach(), prompts, metadata)
"""
EMA = "--enable_ema true --ema_interval 1 --ema_beta 0.5"
HACKED = "--reward_fn {folder}/scores.py:rising --gold_fn {folder}/scores.py:falling --gold_every 0"
VRL = (
    "--reward_fn {folder}/scores.py:red --enable_ema true --ema_interval 1 --ema_beta 0.5 rollout.n=4 "
    "rollout.rollout_batch_size=2 rollout.sample_batch_size=4 actor.gradient_accumulation_steps=1 "
    "eval.num_steps=2 eval.max_prompts=2 eval.use_ema=true trainer.total_epochs=2 trainer.save_freq=1"
)
REWARD_FL = "--diffusion_algorithm reward_fl --mid_timestep 1 --final_timestep 2 --warmup_steps 0 --max_steps 1"
# Its reward: of four samples one is valid, or none; or it has no gradient; or it knows other prompts.
PULLED = f"{REWARD_FL} --reward_fn {{folder}}/scores.py:some --max_eval_samples 0"
UNLOADED = f"{PULLED} --pretrain {{folder}}/hollow"  # whose weights are not there: loading it fails
RESUMED = "--reward_fn {folder}/scores.py:some --max_steps 2 --resume_from {folder}/some"
RUNS = {
    "vrl": f"{VRL} eval.seed=7",
    "vrl_resumed": f"{VRL} eval.seed=7 trainer.resume_from={{folder}}/vrl/checkpoint-1",
    "vrl_run_seed": f"{VRL} eval.seed=7 --seed 5 --max_steps 1",
    "plain": f"--reward_fn {{folder}}/scores.py:red {EMA} --eval_ema false",
    "averaged": f"--reward_fn {{folder}}/scores.py:red {EMA}",
    "some": "--reward_fn {folder}/scores.py:some --max_steps 1 --save_steps 1",
    "moved": f"{RESUMED} --pretrain {{folder}}/moved",
    "other_model": f"{RESUMED} --pretrain {{folder}}/other",
    "other_seed": f"{RESUMED} --seed 7",
    "other_model_allowed": f"{RESUMED} --pretrain {{folder}}/other --resume_other_model true",
    "rolled": f"{HACKED} --guard.policy rollback",
    "few_prompts": "--reward_fn {folder}/scores.py:red --rollout_batch_size 4 --train_batch_size 16 --max_steps 1",
    "odd_size": "--reward_fn {folder}/scores.py:red --height 30",
    "frames": "--reward_fn {folder}/scores.py:red --num_frames 5 --max_steps 1",
    "all_invalid": f"{PULLED} --differentiable_reward {{folder}}/scores.py:smooth_nowhere --reward_max_invalid 1",
    "most_invalid": f"{PULLED} --differentiable_reward {{folder}}/scores.py:smooth",
    "most_invalid_allowed": f"{PULLED} --differentiable_reward {{folder}}/scores.py:smooth --reward_max_invalid 0.75 "
    "--gold_fn {folder}/scores.py:falling",
    "no_training_reward": UNLOADED,
    "no_gradient": f"{UNLOADED} --differentiable_reward {{folder}}/scores.py:flat",
    "unknown_prompts": f"{UNLOADED} --differentiable_reward shape_match --prompt_data {{folder}}/photos.jsonl",
    "few_unknown_prompts": f"{PULLED} --differentiable_reward shape_match --prompt_data {{folder}}/mixed.jsonl",
}


def prepare(folder: Path) -> None:
    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder / "pipeline")
    for name in ("moved", "other"):
        shutil.copytree(folder / "pipeline", folder / name)
    weights = folder / "other" / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    shutil.copytree(folder / "pipeline", folder / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    photos = ["a photo of a cat", "a photo of a dog"]
    for name, texts in (("photos", photos), ("mixed", ["a red circle", "a blue cross", photos[0]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    captions = ["a red circle", "a blue cross", "a green square"]
    rows = [json.dumps({"prompt": text, "note": text.upper()}) + "\n" for text in captions]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "scores.py").write_text(SCORES)


def main(folder: Path) -> None:
    prepare(folder)
    run_all(folder, BASE, RUNS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
