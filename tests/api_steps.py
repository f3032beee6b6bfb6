"""The runs of test_api_drawing_runs: python api_steps.py FOLDER."""

import gc
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import lightrft_visual
from lightrft_visual import evaluate, given, sample
from lightrft_visual.models.tiny.diffusion import (
    TinyDiffusionSettings,
    TinySD15Settings,
    build_pipeline,
    build_sd15_pipeline,
)
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

OUT = Path(sys.argv[-1])
CAPTIONS = [{"prompt": f"a {colour} {shape}"} for colour in ("red", "blue") for shape in ("circle", "square")]
BOTH = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "train_batch_size": 8, "max_steps": 1, "save_steps": -1}
DRAWN = BOTH | {
    "lora_rank": 4, "num_steps": 4, "eval_num_steps": 4, "height": 32, "width": 32, "guidance_scale": 1.0,
    "micro_train_batch_size": 8, "learning_rate": 1e-3, "max_eval_samples": 2, "timestep_fraction": 0.5,
}  # fmt: skip
ANSWERED = BOTH | {
    "engine_type": "hf", "prompt_max_len": 128, "generate_max_len": 4, "parity_every": 0, "init_kl_coef": 0.0,
    "image_dependence_every": 0,
}  # fmt: skip


def redness(images):
    """How red each image is."""
    pixels = [np.asarray(each, dtype=np.float32) / 255 for each in images]
    return [float(each[..., 0].mean() - each[..., 1:].mean()) for each in pixels]


def red_media(media, prompts, metadata):
    """The same with a gradient."""
    return media[:, 0].mean(dim=(-1, -2)) - media[:, 1:].mean(dim=(1, 2, 3))


def length(completions):
    """Tokens are letters here."""
    return [float(len(each)) for each in completions]


def trained(label, result, steps=1):
    assert result.metrics["step"] == steps and result.metrics["grad_norm"] > 0, (label, result.metrics)
    assert result.checkpoint.name == "checkpoint-final"
    print(f"{label}: trained", flush=True)
    return result


def drawing_trainers(flow, ddim) -> None:
    denoised = {"mid_timestep": 0, "final_timestep": 3, "n_samples_per_prompt": 1, "train_batch_size": 2,
                "timestep_fraction": 1.0}  # fmt: skip
    for name, pipeline, reward, more in (
        ("DDPOTrainer", ddim, redness, {"family": "sd15", "scheduler": "model_default", "micro_rollout_batch_size": 8}),
        ("RewardFLTrainer", flow, red_media, denoised),
    ):
        kind = getattr(lightrft_visual, name)
        trained(name, kind(pipeline, reward, CAPTIONS, output_dir=OUT / name, **DRAWN | more).fit())
    images = {colour: Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")}
    pairs = [{"prompt": each["prompt"], "chosen": images["red"], "rejected": images["blue"]} for each in CAPTIONS]
    kind = lightrft_visual.DiffusionDPOTrainer
    settings = {name: value for name, value in DRAWN.items() if name not in ("num_steps", "n_samples_per_prompt")}
    trained("DiffusionDPOTrainer", kind(flow, None, pairs, output_dir=OUT / "pairs", **settings).fit())


def checkpoints(flow) -> None:
    folder, twice = OUT / "flow", {"max_steps": 2, "save_steps": 1, "eval_steps": 1}
    with lightrft_visual.FlowGRPOTrainer(
        flow, redness, CAPTIONS, CAPTIONS[:2], output_dir=folder, enable_ema=True, **DRAWN | twice
    ) as trainer:
        before = trainer.evaluate()
        result = trained("FlowGRPOTrainer", trainer.fit(), steps=2)
        assert abs(before["eval_reward"] - result.evaluations[0]["eval_reward"]) < 1e-6, (before, result.evaluations)
        assert trainer.evaluate()["eval_reward"] == result.metrics["eval_reward"]
        assert (trainer.save(OUT / "copied") / "pytorch_lora_weights.safetensors").is_file()
        numbered = folder / "checkpoint-000002"
        averaged = evaluate(numbered, CAPTIONS[:2], redness, base=flow)
        assert abs(averaged["eval_reward"] - result.metrics["eval_reward"]) < 1e-6, (averaged, result.metrics)
        plain = evaluate(numbered, CAPTIONS[:2], redness, base=flow, eval_ema=False)
        assert plain["eval_reward"] != averaged["eval_reward"]
        names = list(trainer._given)
    assert names and not any(name in given._objects for name in names if name.startswith("train_dataset"))
    ask = dict(n=2, base=flow, num_inference_steps=4)
    own, exported = (sample(each, ["a red circle"], **ask)[0] for each in (numbered, result.checkpoint))
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(own, exported))


def answering_trainer() -> None:
    folder = build_tiny_checkpoint(OUT / "tiny", "qwen2_5_vl")
    rows = [{"prompt": "how many?", "images": [Image.new("RGB", (56, 56), "red")]}, {"prompt": "and now?"}]
    trainer = lightrft_visual.PPOTrainer(folder, length, rows, output_dir=OUT / "PPOTrainer", **ANSWERED)
    trained("PPOTrainer", trainer.fit())


if __name__ == "__main__":
    flow, ddim = build_pipeline(TinyDiffusionSettings()), build_sd15_pipeline(TinySD15Settings())
    checkpoints(flow)
    drawing_trainers(flow, ddim)
    answering_trainer()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "DeepSpeedEngine"], "engines stay in memory"
