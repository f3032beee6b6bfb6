"""Forward and backward of a step's samples: padded, packed, and with each prompt computed once, alternating.

    OMP_NUM_THREADS=2 python scripts/bench/shared_prefix.py               # 4 prompts x 16 completions x 64 tokens
    OMP_NUM_THREADS=2 python scripts/bench/shared_prefix.py --growth      # 1,000 prompt tokens, 4 to 32 completions
    OMP_NUM_THREADS=2 python scripts/bench/shared_prefix.py --mixed       # packed against padded, mixed lengths

The embedded model's shape, random responses. Seconds are those of the process's CPU, divided by its threads, which
other work on the machine disturbs least; medians over `--repeats`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.experience.items import make_experience_batch, strip_padding
from lightrft_visual.experience.model_inputs import ModelInputs
from lightrft_visual.experience.prompts import PromptBatch
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, collate
from lightrft_visual.experience.sampling import ScoringRule
from lightrft_visual.models.loading import load_transformer, open_checkpoint
from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what colour is it?<|im_end|>\n"
WORDS = 256  # ids below are plain bytes


class Bench:
    """An actor of the embedded shape, and micro-batches of made-up responses for it."""

    def __init__(self, folder: str, family: str):
        path = str(build_tiny_checkpoint(Path(folder) / "model", family))
        self.checkpoint = open_checkpoint(path, ModelConfig(), DataConfig())
        self.actor = Actor(load_transformer(path, ModelConfig(), torch.float32), [], self.checkpoint.eos_ids)
        self.draw = np.random.default_rng(0)

    def prompts(self, count: int, side: int) -> list[PromptFeatures]:
        """Prompts with one image of side x side pixels each."""
        size = (side, side, 3)
        images = [[Image.fromarray(self.draw.integers(0, 256, size, dtype=np.uint8))] for _ in range(count)]
        processor = MultimodalDataProcessor(self.checkpoint.tokenizer, self.checkpoint.processor, 8192)
        return processor.features(PromptBatch.of([PROMPT] * count, images, ids=torch.arange(count)))

    def lengthened(self, prompts: list[PromptFeatures], tokens: int) -> list[PromptFeatures]:
        """The same with words behind them, `tokens` in all."""
        return [replace(each, token_ids=each.token_ids + self._words(tokens - len(each.token_ids))) for each in prompts]

    def rollouts(self, prompts: list[PromptFeatures], lengths: Sequence[int]) -> list[Rollout]:
        """A response of each length to each prompt."""
        return [Rollout(each, self._words(n), None, "", False, sample_id=0) for each in prompts for n in lengths]

    def micro_batches(self, rollouts: list[Rollout], size: int, packed: bool = False) -> list[ModelInputs]:
        """`size` samples each."""
        made = []
        for start in range(0, len(rollouts), size):
            part = collate(rollouts[start : start + size], self.checkpoint.tokenizer.pad_token_id, True)
            if packed:
                part.action_log_probs = torch.zeros(part.action_mask.shape)
                part = make_experience_batch(strip_padding(part), packing_samples=True)
            made.append(ModelInputs.of(part))
        return made

    def seconds(self, batches: list[ModelInputs], shared: bool) -> float:
        """CPU seconds of forward and backward over the micro-batches, a thread."""
        self.actor.backbone.share_prefix = shared
        start = time.process_time()
        for each in batches:
            self.actor(each, ScoringRule(), with_entropy=False).log_probs.sum().backward()
        self.actor.zero_grad()
        return (time.process_time() - start) / torch.get_num_threads()

    def medians(self, cases: dict[str, tuple[list[ModelInputs], bool]], repeats: int) -> dict[str, float]:
        """{case: median seconds}, the cases taking turns; (micro-batches, whether prompts are shared) of each."""
        times: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(repeats + 1):
            for name, case in cases.items():
                seconds = self.seconds(*case)
                if turn:  # the first turn warms up
                    times[name].append(seconds)
        return {name: statistics.median(values) for name, values in times.items()}

    def _words(self, count: int) -> list[int]:
        return self.draw.integers(0, WORDS, count).tolist()


def step(bench: Bench, repeats: int) -> None:
    """4 prompts with a 448x448 image x 16 completions x 64 tokens, in micro-batches of 8 and of 16."""
    rollouts = bench.rollouts(bench.prompts(4, 448), [64] * 16)
    cases = {}
    for size in (8, 16):
        padded, packed = (bench.micro_batches(rollouts, size, each) for each in (False, True))
        cases |= {
            f"padded, micro-batches of {size}": (padded, False),
            f"packed, micro-batches of {size}": (packed, False),
            f"shared, micro-batches of {size}": (padded, True),
            f"shared, packed, micro-batches of {size}": (packed, True),
        }
    figures = bench.medians(cases, repeats)
    base = figures["padded, micro-batches of 8"]
    print("| form | s | x padded |\n|---|---|---|")
    for name, seconds in figures.items():
        print(f"| {name} | {seconds:.2f} | {seconds / base:.2f} |")


def growth(bench: Bench, repeats: int) -> None:
    """One prompt of 1,000 tokens and G completions of 64: seconds a sample against prompt / G + completion.

    The prompt's part and a completion's are measured once, from the smallest and the largest G.
    """
    prompts, groups = bench.lengthened(bench.prompts(1, 448), 1000), (4, 8, 16, 32)
    cases = {}
    for group in groups:
        batches = bench.micro_batches(bench.rollouts(prompts, [64] * group), group)
        cases |= {f"padded {group}": (batches, False), f"shared {group}": (batches, True)}
    figures = bench.medians(cases, repeats)
    few, many = (figures[f"shared {group}"] for group in (groups[0], groups[-1]))
    completion = (many - few) / (groups[-1] - groups[0])
    prompt = few - groups[0] * completion
    print("| G | padded ms a sample | shared ms a sample | predicted | difference |\n|---|---|---|---|---|")
    for group in groups:
        padded, shared = (1000 * figures[f"{form} {group}"] / group for form in ("padded", "shared"))
        predicted = 1000 * (prompt / group + completion)
        print(f"| {group} | {padded:.2f} | {shared:.2f} | {predicted:.2f} | {shared / predicted - 1:+.1%} |")


def mixed(bench: Bench, repeats: int) -> None:
    """64 samples of 16 to 256 response tokens; then rows of up to 8,192 tokens of more and more equal segments."""
    lengths = np.random.default_rng(1).integers(16, 257, 16)
    rollouts = bench.rollouts(bench.prompts(4, 112), lengths.tolist())
    cases = {form: (bench.micro_batches(rollouts, 16, form == "packed"), False) for form in ("padded", "packed")}
    figures = bench.medians(cases, repeats)
    print(f"padded {figures['padded']:.2f} s, packed {figures['packed']:.2f} s")
    prompts = bench.prompts(1, 112)
    rest = 512 - len(prompts[0].token_ids)
    rows = {n: bench.micro_batches(bench.rollouts(prompts, [rest] * n), n, packed=True) for n in (2, 4, 8, 16)}
    figures = bench.medians({str(n): (row, False) for n, row in rows.items()}, repeats)
    print("| segments of 512 tokens | s | ms a segment |\n|---|---|---|")
    for count, seconds in figures.items():
        print(f"| {count} | {seconds:.2f} | {1000 * seconds / int(count):.1f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--family", default="qwen2_5_vl")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--growth", action="store_true")
    kinds.add_argument("--mixed", action="store_true")
    arguments = parser.parse_args()
    measure = growth if arguments.growth else mixed if arguments.mixed else step
    with tempfile.TemporaryDirectory() as folder:
        measure(Bench(folder, arguments.family), arguments.repeats)


if __name__ == "__main__":
    main()
