"""`outside_runs.py choices FOLDER`: a run of each kind with the choices of my_choices.py. `outside_runs.py features
FOLDER`: runs of features from outside of the package, and with callbacks. Both write FOLDER/facts.json."""

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
from lightrft_visual.rewards.differentiable import load_differentiable
from lightrft_visual.trainer.hooks import StopRun

HERE = Path(__file__).parent
VL = (
    "--rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8 --micro_rollout_batch_size 8 "
    "--prompt_max_len 128 --report false --actor_learning_rate 1e-3 --pretrain {folder}/model "
    "--prompt_data {folder}/rows.jsonl --output_dir {folder}/{name} "
)
DIFFUSION = (
    "--height 32 --width 32 --eval_num_steps 2 --guidance_scale 1 --max_sequence_length 5 --rollout_batch_size 2 "
    "--n_samples_per_prompt 2 --micro_rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 4 "
    "--lora_rank 2 --report false reward.components.jpeg_compressibility=1.0 --pretrain {folder}/pipeline "
    "--prompt_data {folder}/prompts.txt --output_dir {folder}/diffusion "
)
CHOICES_VL = (
    f"--plugins {HERE}/my_choices.py --advantage_estimator my_sign --policy_loss my_loss --loss_agg_mode my-half "
    "--kl_estimator my_abs --use_kl_loss --tis_mode my_root --engine_type my_engine reward.components.my_letters=1.0 "
    "reward.kwargs.my_letters.per_letter=0.1 --generate_max_len 4 --max_steps 2 --parity_every 0"
)
CHOICES_DIFFUSION = f"plugins={HERE}/my_choices.py --diffusion_algorithm my_imitation --family my_sd3 --max_steps 2"
FEATURES_VL = (
    "--engine_type hf --micro_train_batch_size 4 --generate_max_len 6 --lr_scheduler constant_with_warmup "
    "--init_kl_coef 0 --num_trajectories_to_save 8 --max_steps "
)
LENGTH = "--reward_fn {folder}/length.py:length"
# In this order: what a file registers follows the later runs of the process too.
FEATURES = {
    "callbacks": f"4 {LENGTH}",
    "term": f"2 {LENGTH} --plugins {HERE}/own_term.py",
    "hook": f"4 {LENGTH} --plugins {HERE}/own_hook.py --save_steps 2",
    "hook_resumed": f"4 {LENGTH} --plugins {HERE}/own_hook.py --resume_from {{folder}}/hook/checkpoint-000002",
}


class Told:
    """Callbacks of a user, without a base class: notes what it is told, and ends the run after the second step."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def setup(self, context):
        self.finished = context.step
        self.moments.append(f"setup of {context.total_steps} steps")

    def on_scores(self, rollouts):
        self.moments.append(f"scores of {len(rollouts)}")
        return rollouts

    def on_update(self, result):
        self.moments.append(f"update, applied {result.applied}")

    def on_metrics(self, metrics):
        assert "reward_mean" in metrics
        if self.finished() == 2:
            raise StopRun("two steps are enough", export=True)

    def close(self):
        self.moments.append("closed")


def trained(folder: Path, name: str, flags: str, callbacks=()):
    """The trainer of a run that is over."""
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
    from lightrft_visual.trainer.vl.trainer import build_trainer

    drawing = name == "diffusion"
    argv = ((DIFFUSION if drawing else VL) + flags).format(folder=folder, name=name).split()
    if drawing:
        trainer = build_diffusion_trainer(load_config(DiffusionRunConfig, argv, preset=None), callbacks)
    else:
        trainer = build_trainer(load_config(RunConfig, argv), callbacks)
    trainer.fit()
    trainer.close()
    return trainer


def choices(folder: Path) -> dict[str, dict[str, object]]:
    trainer = trained(folder, "vl", CHOICES_VL)
    engine = trainer.maker.engine
    family = engine.actor.backbone.family
    assert family.banned_ids(engine.tokenizer) == engine.actor.banned_ids.tolist()
    names = {"trainer": trainer, "engine": engine, "family": family}
    vl = {name: type(value).__name__ for name, value in names.items()}
    parts = trained(folder, "diffusion", CHOICES_DIFFUSION).parts
    adapted = {name.rpartition(".lora_")[0] for name, p in parts.policy.named_parameters() if p.requires_grad}
    red = load_differentiable("my_redness", {"weight": 2.0})(torch.ones(1, 3, 2, 2), ["a"], [{}])[0].item()
    named = {"family": type(parts.policy.family).__name__, "loss": type(parts.loss).__name__}
    return {"vl": vl, "diffusion": {"red": red, **named, "adapted": list(adapted)}}


def features(folder: Path) -> dict[str, list[str]]:
    (folder / "length.py").write_text("def length(completions):\n    return [len(text) / 10 for text in completions]\n")
    flags = {"diffusion": "--num_steps 3 --max_steps 3", **{name: FEATURES_VL + own for name, own in FEATURES.items()}}
    told = {name: Told() for name in flags}
    for name, own in flags.items():
        trained(folder, name, own, [told[name]] if name in ("callbacks", "diffusion") else ())
    return {name: each.moments for name, each in told.items()}


def main(kind: str, folder: Path) -> None:
    Image.new("RGB", (56, 56), "red").save(folder / "red.png")
    rows = [{"prompt": "say yes"}, {"prompt": "say no"}]
    family = "qwen2"
    if kind == "choices":
        rows[1], family = {"prompt": "what colour is it?", "images": ["red.png"]}, "qwen2_5_vl"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.txt").write_text("a red circle\na blue cross\n")
    build_tiny_checkpoint(folder / "model", family, texts=[row["prompt"] for row in rows])
    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder / "pipeline")
    facts = choices(folder) if kind == "choices" else features(folder)
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
