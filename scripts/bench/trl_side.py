"""TRL's side of against_trl.py: GRPO by TRL 1.16 with vLLM in its process, in its environment.

    python trl_side.py MODEL ROWS OUT.json --steps 160 [--seed 1] [--timed PROMPTS SAMPLES TOKENS MICRO]

This project is on PYTHONPATH for the scorer alone. Optimizer, schedule, clip, batch and sampling are those of
examples/configs/embedded_vl.yaml under TRL's names; --timed: completions have TOKENS tokens exactly. --transformers:
completions by transformers' generate, not by vLLM. OUT.json gets the reward, loss and gradient norm of each step, the
time at its end, and the seconds of each weight load.

What TRL 1.16 needs to run a Qwen2.5-VL beside vLLM 0.32 on CPU, each said where it is done (`workarounds`):

1. vLLM's engine core in this process, and its CPU settings.
2. Prompt ids with one placeholder an image: TRL gives vLLM ids that are expanded already, and vLLM expands them again.
3. Weights by vLLM's `reload_weights`: TRL's `load_weights` of single tensors fails on packed CPU weights. What TRL
   itself would do per tensor is done for all at once, which is the faster form.
4. After a sync the caches of images and of their features are reset beside the prefix cache: else vLLM ends with
   'Encoder cache miss', or serves features of the old weights.
5. Tokens of images are never sampled, by `bad_words` of the sampling parameters: else the forward ends with 'image
   features and image tokens do not match'.
6. vLLM in float32, as both trainers and our engine are here: TRL gives it no precision, and vLLM takes 16 bits for
   weights of 32.
7. A processor that pads on the left, as TRL loads it where it is given none: with one that pads on the right, the kinds
   of tokens do not stand beside the left-padded prompts that they belong to, and the positions of all shorter prompts
   of a batch are wrong (log-probs by 0.01).
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from lightrft_visual.rewards.functions.answers import Exact

LEARNING = {
    "learning_rate": 5e-4, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "epsilon": 0.2,
}  # fmt: skip


def workarounds(image_token: int, weight_seconds: list[float]) -> None:
    """Points 2 to 4 and 6 above; `weight_seconds` gets the time of every weight load."""
    generate = VLLMGeneration.generate

    def generate_collapsed(self, prompts, images, *arguments, **named):
        prompts = [
            [t for index, t in enumerate(ids) if t != image_token or index == 0 or ids[index - 1] != image_token]
            for ids in prompts
        ]
        return generate(self, prompts, images, *arguments, **named)

    def sync_weights(self) -> None:
        started = time.perf_counter()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        weight_seconds.append(time.perf_counter() - started)
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    VLLMGeneration.generate, VLLMGeneration.sync_weights = generate_collapsed, sync_weights
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")


class Clock(TrainerCallback):
    """When each optimizer step was done: between two lies a whole step, generation included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_, **__) -> None:
        self.ends.append(time.perf_counter())


def of_rows(path: Path) -> Dataset:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    images = [[Image.open(path.parent / name).convert("RGB") for name in row["images"]] for row in found]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in found]
    return Dataset.from_dict({"prompt": prompts, "images": images, "reference": [row["reference"] for row in found]})


def exact(completions, reference, **_) -> list[float]:
    return Exact()([message[0]["content"] for message in completions], reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timed", type=int, nargs=4)
    parser.add_argument("--transformers", action="store_true")
    a = parser.parse_args()
    prompts, samples, tokens, micro = a.timed or (32, 8, 8, 256)
    learning = {"learning_rate": 1e-6} if a.timed else LEARNING
    processor = AutoProcessor.from_pretrained(a.model, padding_side="left")
    special = processor.tokenizer.all_special_tokens
    banned = [name for name in special if "image" in name or "video" in name or "vision" in name]
    weight_seconds: list[float] = []
    workarounds(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"), weight_seconds)
    if a.transformers:
        never = processor.tokenizer.convert_tokens_to_ids(banned)
        sampling = {"use_vllm": False, "generation_kwargs": {"suppress_tokens": never, "min_new_tokens": tokens}}
    else:
        sampling = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 1024,
            "generation_kwargs": {"bad_words": banned} | ({"min_tokens": tokens} if a.timed else {}),
        }  # fmt: skip
    settings = GRPOConfig(
        output_dir=str(a.out.with_suffix("")), num_generations=samples, per_device_train_batch_size=micro,
        gradient_accumulation_steps=prompts * samples // micro, max_completion_length=tokens, max_steps=a.steps,
        beta=0.0, bf16=False, use_cpu=not torch.cuda.is_available(), seed=a.seed, report_to="none", logging_steps=1,
        save_strategy="no", temperature=1.0, gradient_checkpointing=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"}, **learning, **sampling,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=a.model, reward_funcs=exact, args=settings, train_dataset=of_rows(a.rows), processing_class=processor,
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    logs = [
        {name: float(log[name]) for name in ("reward", "loss", "grad_norm")}
        for log in trainer.state.log_history
        if "grad_norm" in log
    ]
    a.out.write_text(json.dumps({"steps": logs, "ends": clock.ends, "weights": weight_seconds}))
    os._exit(0)  # vLLM's shutdown takes the process group with it


if __name__ == "__main__":
    main()
