"""`dummy_runs.py FOLDER`: a whole run of each kind with the choices of my_choices.py; writes FOLDER/facts.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from PIL import Image

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

PLUGIN = Path(__file__).with_name("my_choices.py")
VL = (
    "--advantage_estimator my_sign --policy_loss my_loss --loss_agg_mode my-half --kl_estimator my_abs --use_kl_loss "
    "--tis_mode my_root --engine_type my_engine reward.components.my_letters=1.0 "
    "reward.kwargs.my_letters.per_letter=0.1 --rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8 "
    "--micro_rollout_batch_size 8 --generate_max_len 4 --prompt_max_len 128 --max_steps 2 --parity_every 0 "
    "--report false --actor_learning_rate 1e-3"
)
DIFFUSION = (
    "--diffusion_algorithm my_imitation --family my_sd3 --height 32 --width 32 --eval_num_steps 2 --guidance_scale 1 "
    "--max_sequence_length 5 --rollout_batch_size 2 --n_samples_per_prompt 2 --micro_rollout_batch_size 4 "
    "--train_batch_size 4 --micro_train_batch_size 4 --lora_rank 2 --report false --max_steps 2 "
    "reward.components.jpeg_compressibility=1.0"
)


def vl(folder: Path) -> dict[str, object]:
    from lightrft_visual.trainer.vl.trainer import build_trainer

    Image.new("RGB", (56, 56), "red").save(folder / "red.png")
    rows = [{"prompt": "what colour is it?", "images": ["red.png"]}, {"prompt": "say yes"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_tiny_checkpoint(folder / "model", "qwen2_5_vl", texts=[row["prompt"] for row in rows])
    given = ["--pretrain", str(folder / "model"), "--prompt_data", str(folder / "rows.jsonl")]
    argv = [*VL.split(), *given, "--plugins", str(PLUGIN), "--output_dir", str(folder / "vl")]
    trainer = build_trainer(load_config(RunConfig, argv))
    trainer.fit()
    trainer.close()
    engine = trainer.maker.engine
    family = engine.actor.backbone.family
    assert family.banned_ids(engine.tokenizer) == engine.actor.banned_ids.tolist()
    names = {"trainer": trainer, "engine": engine, "family": family}
    return {name: type(value).__name__ for name, value in names.items()}


def diffusion(folder: Path) -> dict[str, object]:
    from lightrft_visual.rewards.differentiable import load_differentiable
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer

    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder / "pipeline")
    (folder / "prompts.txt").write_text("a red circle\na blue cross\n")
    given = ["--pretrain", str(folder / "pipeline"), "--prompt_data", str(folder / "prompts.txt")]
    argv = [*DIFFUSION.split(), *given, f"plugins={PLUGIN}", "--output_dir", str(folder / "diffusion")]
    trainer = build_diffusion_trainer(load_config(DiffusionRunConfig, argv, preset=None))
    policy = trainer.parts.policy
    adapted = {name.rpartition(".lora_")[0] for name, p in policy.named_parameters() if p.requires_grad}
    trainer.fit()
    trainer.close()
    red = load_differentiable("my_redness", {"weight": 2.0})(torch.ones(1, 3, 2, 2), ["a"], [{}])[0].item()
    return {
        "red": red,
        "family": type(policy.family).__name__,
        "loss": type(trainer.parts.loss).__name__,
        "adapted": list(adapted),
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / "facts.json").write_text(json.dumps({"vl": vl(out), "diffusion": diffusion(out)}))
