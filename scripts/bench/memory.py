"""Memory of a step's batch with images, against one copy of them.

    python scripts/bench/memory.py [--prompts 128] [--samples 16] [--patches 1200] [--prompt 340] [--tokens 128]

Decoded images go through the processor of Qwen2.5-VL as in a run. Prints the bytes of all different tensors that the
stages' objects hold together, and for each stage the largest memory that the process had filled in it, above what it
had before there were images. Exit code 1 above 1.2 copies of the patches.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.rollouts import PromptBatch, PromptFeatures, Rollout, collate, release_media
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.runtime.host_memory import give_back_freed_memory, keep_freed_memory

PATCH_WIDTH = 3 * 2 * 14 * 14  # channels, frames and pixels of a patch of Qwen2-VL and Qwen2.5-VL
WIDTH = 20  # patches; rows and columns are even
MICRO_BATCH = 8
LIMIT = 1.2  # copies of the patches
MIB = 2**20


def resident() -> int:
    """Bytes that this process has filled itself, swapped out or not: pages of files, such as libraries, the kernel
    takes back as others need room."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


class Peaks:
    """The largest resident memory of each stage above that of the beginning, read every two milliseconds."""

    def __init__(self) -> None:
        self.base, self.bytes = resident(), {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage, which may be entered again."""
        inside = True

        def watch() -> None:
            while inside:
                self.bytes[name] = max(self.bytes.get(name, 0), resident() - self.base)
                time.sleep(0.002)

        reader = threading.Thread(target=watch)
        reader.start()
        try:
            yield
        finally:
            inside = False
            reader.join()


def data_processor(patches: int) -> tuple[MultimodalDataProcessor, str]:
    """Qwen2.5-VL's, and its placeholder."""
    tokenizer = build_tokenizer(["what is it ?"])
    processor = build_processor("qwen2_5_vl", tokenizer, max_pixels=patches * 14 * 14)
    return MultimodalDataProcessor(tokenizer, processor, 10**6), processor.image_token


def decoded_images(count: int, patches: int) -> list[list[Image.Image]]:
    """One image of noise for each prompt; patches: a multiple of 40."""
    random = np.random.default_rng(0)
    size = (patches // WIDTH * 14, WIDTH * 14, 3)
    return [[Image.fromarray(random.integers(0, 256, size, dtype=np.uint8))] for _ in range(count)]


def prompts_of(count: int, patches: int, length: int) -> list[PromptFeatures]:
    """Prompts of about `length` tokens with one decoded image and its `patches` patches each."""
    made, placeholder = data_processor(patches)
    text = placeholder + "what " * max(1, length - patches // 4)
    return made.features(PromptBatch.of([text] * count, decoded_images(count, patches)))


def rollouts_of(prompts: list[PromptFeatures], samples: int, tokens: int) -> list[Rollout]:
    """`samples` scored responses of `tokens` tokens to each prompt."""
    made = []
    for index, prompt in enumerate(prompts):
        for each in range(samples):
            number = index * samples + each
            ids = torch.randint(1000, 100_000, (tokens,)).tolist()
            made.append(Rollout(prompt, ids, torch.rand(tokens).tolist(), "", False, number, reward=1.0))
    return made


def experience_of(rollouts: list[Rollout]) -> list[Any]:
    """Micro-batches as the forward stage leaves them: with log-probs, values of the reference, KL, advantages."""
    made = []
    for start in range(0, len(rollouts), MICRO_BATCH):
        experience = collate(rollouts[start : start + MICRO_BATCH], pad_id=0, vision=True)
        shape = experience.action_mask.shape
        for name in ("action_log_probs", "action_entropy", "base_action_log_probs", "kl", "advantages", "returns"):
            setattr(experience, name, torch.zeros(shape))
        made.append(experience)
    return made


def storages(objects: Iterable[Any]) -> dict[int, int]:
    """Bytes of each different storage that the objects hold, by its address.

    Only what stands in their attributes: names of the contract such as `pixel_values` join tensors when they are read.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = list(objects)
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each if each and not isinstance(each[0], int | float) else []
        elif hasattr(each, "__dict__"):
            left += vars(each).values()
    return found


def through_the_stages(prompts: list[PromptFeatures], samples: int, tokens: int, peaks: Peaks) -> int:
    """Bytes of all tensors held at once, from rollouts to the last micro-batch.

    As in a step of a trainer: decoded images are let go, but of 8 samples, once rollouts are scored; rollouts stand
    beside the experience, and are let go before it is put into the buffer. The list of prompts is emptied.
    """
    with peaks.stage("rollouts"):
        rollouts = rollouts_of(prompts, samples, tokens)
        prompts.clear()
    shown = {rollout.sample_id for rollout in rollouts[:: len(rollouts) // 8]}
    give_back_freed_memory(release_media(rollouts, shown))
    with peaks.stage("experience"):
        experiences = experience_of(rollouts)
        held = sum(storages([rollouts, experiences]).values())
    rollouts.clear()
    buffer = NaiveReplayBuffer(MICRO_BATCH)
    with peaks.stage("buffer"):
        while experiences:
            buffer.append(experiences[0])
            if len(experiences) % 32 == 1:  # the batch stands in the buffer and, as far as it is left, in experience
                held = max(held, sum(storages([experiences, buffer.items]).values()))
            experiences.pop(0)
    with peaks.stage("micro-batches"):
        for step in buffer.plan(0):
            for micro_batch in step:
                loaded = buffer.load(micro_batch)
                own = storages([loaded])
    return max(held, sum((storages(buffer.items) | own).values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"prompts": 128, "samples": 16, "patches": 1200, "prompt": 340, "tokens": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    keep_freed_memory()  # as a run does
    prompts_of(1, asked.patches, asked.prompt)  # libraries take what they need
    peaks, images = Peaks(), asked.prompts * asked.patches * PATCH_WIDTH * 4
    with peaks.stage("preprocessing"):
        prompts = prompts_of(asked.prompts, asked.patches, asked.prompt)
    held = through_the_stages(prompts, asked.samples, asked.tokens, peaks)
    print(f"one copy of the images: {images / MIB:.0f} MiB; {asked.prompts * asked.samples} samples")
    print(f"all tensors held: {held / MIB:.0f} MiB, {held / images:.3f} copies")
    for name, highest in peaks.bytes.items():
        print(f"{name}: resident memory rises by {highest / MIB:.0f} MiB, {highest / images:.3f} copies")
    return int(max(held, *peaks.bytes.values()) > LIMIT * images)


if __name__ == "__main__":
    sys.exit(main())
