"""TRL's side of `against_trl.sh --learn`: GRPO by TRL 1.16 on rows with one image each, and what it writes of it.

    python trl_learn.py MODEL ROWS --steps 160 --seed 1 --out rewards.json

Runs in TRL's environment, with this project on PYTHONPATH for the scorer alone. Optimizer, schedule, clip, batch and
sampling are those of examples/configs/embedded_vl.yaml: what TRL has under other names is set here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch  # after trl_steps, which sets up vLLM's process
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_steps import dataset, left_padding, workarounds

from lightrft_visual.rewards.functions.exact import Exact

PROMPTS, SAMPLES, TOKENS = 32, 8, 8


class Rewards(TrainerCallback):
    """The mean reward of each step, as TRL logs it, and when."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.begun = time.perf_counter()
        self.seconds: list[float] = []

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            self.seconds.append(time.perf_counter() - self.begun)


def exact(completions, reference, **_) -> list[float]:
    return Exact()([message[0]["content"] for message in completions], reference)


def settings(output: Path, steps: int, seed: int, **others) -> GRPOConfig:
    """Those of examples/configs/embedded_vl.yaml under TRL's names, and `others`."""
    return GRPOConfig(
        output_dir=str(output), num_generations=SAMPLES, per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1, max_completion_length=TOKENS, max_steps=steps, learning_rate=5e-4,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, epsilon=0.2, beta=0.0, bf16=False,
        use_cpu=not torch.cuda.is_available(), seed=seed, report_to="none", save_strategy="no", logging_steps=1,
        temperature=1.0, gradient_checkpointing=False, disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
        **others,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    processor = left_padding(a.model)
    tokens = {name: processor.tokenizer.convert_tokens_to_ids(name) for name in processor.tokenizer.all_special_tokens}
    banned = [name for name in tokens if "image" in name or "video" in name or "vision" in name]
    workarounds(tokens["<|image_pad|>"], [])
    vllm = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 512}
    config = settings(
        a.out.with_suffix(""), a.steps, a.seed, use_vllm=True, generation_kwargs={"bad_words": banned}, **vllm
    )
    found = [json.loads(line) for line in a.rows.read_text(encoding="utf-8").splitlines()]
    rows = dataset(a.rows, processor).add_column("reference", [row["reference"] for row in found])
    noted = Rewards()
    trainer = GRPOTrainer(
        model=a.model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=processor,
        callbacks=[noted],
    )  # fmt: skip
    trainer.train()
    a.out.write_text(json.dumps({"rewards": noted.rewards, "seconds": noted.seconds[-1]}))
    os._exit(0)  # vLLM's shutdown takes the process group with it


if __name__ == "__main__":
    main()
