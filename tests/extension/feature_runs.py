"""`feature_runs.py FOLDER`: runs of features from outside of the package, and with callbacks; writes facts.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.trainer.hooks import StopRun

HERE = Path(__file__).parent
ROWS = [{"prompt": "say yes"}, {"prompt": "say no"}]
VL = (
    "--engine_type hf --rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8 "
    "--micro_rollout_batch_size 8 --micro_train_batch_size 4 --generate_max_len 6 --prompt_max_len 128 --report false "
    "--actor_learning_rate 1e-3 --lr_scheduler constant_with_warmup --init_kl_coef 0 "
    "--num_trajectories_to_save 8 --max_steps"
)
DIFFUSION = (
    "--height 32 --width 32 --num_steps 3 --eval_num_steps 2 --guidance_scale 1 --max_sequence_length 5 "
    "--rollout_batch_size 2 --n_samples_per_prompt 2 --micro_rollout_batch_size 4 --train_batch_size 4 "
    "--micro_train_batch_size 4 --lora_rank 2 --report false --max_steps 3 reward.components.jpeg_compressibility=1.0"
)
LENGTH = "--reward_fn {folder}/length.py:length"
# In this order: what a file registers follows the later runs of the process too.
RUNS = {
    "callbacks": f"4 {LENGTH}",
    "scorer": f"2 --plugins {HERE}/own_scorer.py reward.components.vowels=1.0",
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


def vl(folder: Path, name: str, flags: str) -> list[str]:
    from lightrft_visual.trainer.vl.trainer import build_trainer

    given = ["--pretrain", str(folder / "model"), "--prompt_data", str(folder / "rows.jsonl")]
    argv = [*VL.split(), *flags.format(folder=folder).split(), *given, "--output_dir", str(folder / name)]
    told = Told()
    trainer = build_trainer(load_config(RunConfig, argv), [told] if name == "callbacks" else ())
    trainer.fit()
    trainer.close()
    return told.moments


def diffusion(folder: Path) -> list[str]:
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer

    (folder / "prompts.txt").write_text("a red circle\na blue cross\n")
    build_pipeline(TinyDiffusionSettings(layers=1)).save_pretrained(folder / "pipeline")
    given = ["--pretrain", str(folder / "pipeline"), "--prompt_data", str(folder / "prompts.txt")]
    argv = [*DIFFUSION.split(), *given, "--output_dir", str(folder / "diffusion")]
    told = Told()
    trainer = build_diffusion_trainer(load_config(DiffusionRunConfig, argv, preset=None), [told])
    trainer.fit()
    trainer.close()
    return told.moments


def main(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "length.py").write_text("def length(completions):\n    return [len(text) / 10 for text in completions]\n")
    build_tiny_checkpoint(folder / "model", "qwen2", texts=[row["prompt"] for row in ROWS])
    facts = {"diffusion": diffusion(folder)}
    facts |= {name: vl(folder, name, flags) for name, flags in RUNS.items()}
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
