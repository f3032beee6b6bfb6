"""What float64 in attention and products of models that draw costs on the host: CPU seconds, all forms in turns.

    python scripts/bench/exact_attention.py [--rounds 5]

The tiny Janus with random weights, half drawings, half questions about an image, as in a batch of its recipe: drawing
and answering, then forward and backward of the replay. Beside it attention alone at the shape of a larger model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch import nn

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.model_inputs import ModelInputs
from lightrft_visual.experience.prompts import PromptBatch
from lightrft_visual.experience.rollouts import collate
from lightrft_visual.experience.sampling import SamplingSettings
from lightrft_visual.models.attention import EXACT_NAME, NAME, exact_attention, segment_attention
from lightrft_visual.models.exact import ExactLinear
from lightrft_visual.models.loading import Checkpoint, load_transformer, open_checkpoint
from lightrft_visual.models.logprobs import LogProbLinear
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.rollout.stage import RolloutStage

SETTINGS = SamplingSettings(n=8, max_new_tokens=8, guidance_scale=2.0)
FORMS = {"float32": (NAME, False), "attention in float64": (EXACT_NAME, False), "products too": (EXACT_NAME, True)}


def measured(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def prompts() -> PromptBatch:
    """16 of each kind."""
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    pixels = np.random.default_rng(0).integers(0, 256, (16, 56, 56, 3), dtype=np.uint8)
    drawn = [turn("a red circle") + "<begin_of_image>"] * 16
    asked = [turn("<image_placeholder>\nhow many red circles are there?")] * 16
    return PromptBatch.of([*drawn, *asked], [None] * 16 + [[Image.fromarray(each)] for each in pixels])


def whole_model(folder: Path, rounds: int) -> dict[tuple[str, str], list[float]]:
    """CPU seconds of each part of a step, by (part, form)."""
    path = str(build_tiny_checkpoint(folder / "janus", "janus"))
    checkpoint: Checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
    transformer = load_transformer(path, ModelConfig(), torch.float32)
    actor = Actor(transformer, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)
    linear = [module for module in actor.modules() if type(module) is ExactLinear]
    heads = [module for module in actor.modules() if isinstance(module, LogProbLinear)]
    stage = RolloutStage(
        TransformersEngine(actor, checkpoint.tokenizer, 128),
        MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 256),
        run_seed=0,
    )
    batch, found = prompts(), defaultdict(list)
    rollouts = stage.generate(batch, SETTINGS)
    inputs = [
        ModelInputs.of(collate(rollouts[start : start + 128], checkpoint.tokenizer.pad_token_id, True))
        for start in (0, 128)
    ]

    def train() -> None:
        for each in inputs:
            actor(each, SETTINGS.scoring).log_probs.sum().backward()

    for number in range(rounds + 1):
        for form, (attention, products) in FORMS.items():
            transformer.base_model.language_model.config._attn_implementation = attention
            for module in linear:
                module.__class__ = ExactLinear if products else nn.Linear
            for head in heads:
                head.exact = products
            for part, work in (("generate", lambda: stage.generate(batch, SETTINGS)), ("train", train)):
                seconds = measured(work)
                if number:  # the first round warms up
                    found[part, form].append(seconds)
    return found


def repeated(function: Callable[..., object], times: int, arguments: tuple) -> None:
    for _ in range(times):
        function(*arguments)


def attention_alone(rounds: int) -> dict[tuple[str, str], list[float]]:
    """Of 16 heads of 128 numbers: one token over a cache of 600, and a whole sample of 600 tokens."""
    functions, found = dict(zip(FORMS, (segment_attention, exact_attention))), defaultdict(list)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True
    for part, queries, repeats in (("one token over a cache of 600", 1, 20), ("600 tokens", 600, 3)):
        query, key, value = (torch.randn(2, 16, count, 128) for count in (queries, 600, 600))
        for number in range(rounds + 1):
            for name, function in functions.items():
                seconds = measured(partial(repeated, function, repeats, (module, query, key, value, None)))
                if number:
                    found[part, name].append(seconds / repeats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        found = whole_model(Path(folder), rounds) | attention_alone(rounds)
    for part in dict.fromkeys(part for part, _ in found):
        plain, *others = ((form, median(found[part, form])) for form in FORMS if (part, form) in found)
        told = [f"{form} {seconds:.4f} s, {seconds / plain[1]:.2f} times" for form, seconds in others]
        print(f"{part}: {plain[0]} {plain[1]:.4f} s; {'; '.join(told)}")


if __name__ == "__main__":
    main()
