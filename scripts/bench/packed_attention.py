"""Forward and backward of one train batch: padded, packed by segments, and packed with a dense mask, alternating.

4 prompts x 16 completions x 64 tokens, one 448x448 image a prompt, the embedded model's shape, micro-batches of 8::

    python scripts/bench/packed_attention.py --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.items import make_experience_batch, strip_padding
from lightrft_visual.experience.model_inputs import ModelInputs
from lightrft_visual.experience.prompts import PromptBatch
from lightrft_visual.experience.rollouts import Rollout, collate
from lightrft_visual.experience.sampling import ScoringRule
from lightrft_visual.models.attention import NAME
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what colour is it?<|im_end|>\n"


def micro_batches(checkpoint, prompts: int, completions: int, tokens: int, side: int, size: int, packed: bool):
    """Model inputs of made-up responses, `size` samples each."""
    draw = np.random.default_rng(0)
    images = [[Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8))] for _ in range(prompts)]
    processor = MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 4096)
    features = processor.features(PromptBatch.of([PROMPT] * prompts, images))
    rollouts = [
        Rollout(prompt, draw.integers(0, 256, tokens).tolist(), None, "", False, sample_id=0)
        for prompt in features
        for _ in range(completions)
    ]
    made = []
    for start in range(0, len(rollouts), size):
        experience = collate(rollouts[start : start + size], checkpoint.tokenizer.pad_token_id, True)
        if packed:
            experience.action_log_probs = torch.zeros(experience.action_mask.shape)
            experience = make_experience_batch(strip_padding(experience), packing_samples=True)
        made.append(ModelInputs.of(experience))
    return made


def seconds(actor: Actor, inputs: list[ModelInputs]) -> float:
    """Of the forward and backward passes of all micro-batches."""
    start = time.perf_counter()
    for each in inputs:
        actor(each, ScoringRule(), with_entropy=False).log_probs.sum().backward()
    actor.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    """Print the median seconds of each form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(build_tiny_checkpoint(Path(folder) / "model", "qwen2_5_vl"))
        checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
        actor = Actor(load_transformer(path, ModelConfig(), torch.float32), [], checkpoint.eos_ids)
        padded, packed = (micro_batches(checkpoint, 4, 16, 64, 448, 8, each) for each in (False, True))
        times: dict[str, list[float]] = {"padded": [], "packed, segments": [], "packed, dense mask": []}
        for _ in range(arguments.repeats):
            for form, inputs in zip(times, (padded, packed, packed)):
                dense = form.endswith("mask")
                actor.backbone.by_segments = not dense
                actor.backbone.base.language_model.config._attn_implementation = "sdpa" if dense else NAME
                times[form].append(seconds(actor, inputs))
    print(f"{padded[0].sequences.shape[1]} tokens a sample, {packed[0].sequences.shape[1]} a packed row")
    for form, values in times.items():
        print(f"{form}: {statistics.median(values):.2f} s")


if __name__ == "__main__":
    main()
