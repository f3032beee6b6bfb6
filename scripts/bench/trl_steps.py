"""TRL's side of against_trl.sh: seconds of GRPO steps by TRL 1.16 with vLLM in its process, in its environment.

    python trl_steps.py MODEL ROWS --prompts 8 --samples 8 --tokens 32 --micro 64 --steps 10 --out seconds.json

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
7. A processor that pads on the left, as TRL loads it where it is given none (`left_padding`): with one that pads on the
   right, the kinds of tokens do not stand beside the left-padded prompts that they belong to, and the positions of all
   shorter prompts of a batch are wrong (log-probs by 0.01).

Completions have `--tokens` tokens exactly. No KL to a reference, one update a rollout, the reward counts letters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

WARM_UP = 3


def workarounds(image_token: int, weight_seconds: list[float]) -> None:
    """Points 2 to 4 and 6 above; `weight_seconds` gets the time of every weight load."""
    generate = VLLMGeneration.generate

    def generate_collapsed(self, prompts, images, *arguments, **named):
        prompts = [
            [t for place, t in enumerate(ids) if t != image_token or place == 0 or ids[place - 1] != image_token]
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


def left_padding(model: str):
    """The model's processor, see point 7 above."""
    return AutoProcessor.from_pretrained(model, padding_side="left")


class Clock(TrainerCallback):
    """The time between two optimizer steps: a whole step, generation included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_, **__) -> None:
        self.ends.append(time.perf_counter())


def dataset(rows: Path, processor) -> Dataset:
    """Conversational prompts with their images."""
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    images = [[Image.open(rows.parent / name).convert("RGB") for name in row["images"]] for row in found]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in found]
    return Dataset.from_dict({"prompt": prompts, "images": images})


def letters(completions, **_) -> list[float]:
    return [len(set(message[0]["content"])) / 10 for message in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    for name in ("prompts", "samples", "tokens", "micro", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    processor = left_padding(a.model)
    tokens = {name: processor.tokenizer.convert_tokens_to_ids(name) for name in processor.tokenizer.all_special_tokens}
    banned = [name for name in tokens if "image" in name or "video" in name or "vision" in name]
    weight_seconds: list[float] = []
    workarounds(tokens["<|image_pad|>"], weight_seconds)
    settings = GRPOConfig(
        output_dir=str(a.out.with_suffix("")), use_vllm=True, vllm_mode="colocate", num_generations=a.samples,
        per_device_train_batch_size=a.micro, gradient_accumulation_steps=a.prompts * a.samples // a.micro,
        max_completion_length=a.tokens, max_steps=a.steps + WARM_UP, learning_rate=1e-6, beta=0.0, bf16=False,
        use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no", logging_steps=10**6, seed=1,
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=1024, temperature=1.0, gradient_checkpointing=False,
        disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
        generation_kwargs={"min_tokens": a.tokens, "bad_words": banned},
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=a.model, reward_funcs=letters, args=settings, train_dataset=dataset(a.rows, processor),
        processing_class=processor, callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:])][WARM_UP - 1 :]
    facts = {"step": statistics.median(seconds), "weights": statistics.median(weight_seconds[WARM_UP:])}
    a.out.write_text(json.dumps(facts))
    print(facts, flush=True)
    os._exit(0)  # vLLM's shutdown takes the process group with it


if __name__ == "__main__":
    main()
