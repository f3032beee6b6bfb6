"""Host memory of a step's batch against one copy of its images: rollouts, experience, replay buffer, micro-batches.

    python scripts/bench/host_memory.py [--prompts 128] [--samples 16] [--patches 1200] [--prompt 340] [--tokens 128]
    python scripts/bench/host_memory.py --against 4

Prints the bytes of all different tensors that the stages' objects hold together, and how far the process's resident
memory rises while micro-batches are loaded one after the other. Exits with 1 above 1.2 copies.

With --against both numbers of samples a prompt are measured on the same prompts, each in a process of its own; exits
with 1 where --samples takes more than 1.1 times the memory of --against.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lightrft_visual.batches.rollouts import PromptFeatures, Rollout, collate
from lightrft_visual.batches.vision import VisionTensors
from lightrft_visual.replay.buffer import NaiveReplayBuffer

PATCH_WIDTH = 3 * 2 * 14 * 14  # channels, frames and pixels of a patch of Qwen2-VL and Qwen2.5-VL
MICRO_BATCH = 8
LIMIT, GROWTH = 1.2, 1.1
MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process has filled itself, swapped out or not.

    Pages of files do not count: the kernel takes those of libraries back and reads them again as others need room.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


def prompts_of(count: int, patches: int, length: int) -> list[PromptFeatures]:
    """Prompts of `length` tokens with one decoded image and its `patches` patches each; patches: a multiple of 20."""
    rows = patches // 20
    return [
        PromptFeatures(
            text="",
            token_ids=list(range(length)),
            group_id=index,
            images=[Image.new("RGB", (20 * 14, rows * 14))],
            vision=VisionTensors.of(
                pixel_values=torch.rand(patches, PATCH_WIDTH), image_grid_thw=torch.tensor([[1, rows, 20]])
            ),
        )
        for index in range(count)
    ]


def rollouts_of(prompts: list[PromptFeatures], samples: int, tokens: int) -> list[Rollout]:
    """`samples` scored responses of `tokens` tokens to each prompt."""
    return [
        Rollout(prompt, list(range(tokens)), [-1.0] * tokens, "", False, index * samples + each, reward=1.0)
        for index, prompt in enumerate(prompts)
        for each in range(samples)
    ]


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


def through_the_stages(prompts: list[PromptFeatures], samples: int, tokens: int) -> tuple[int, int]:
    """(bytes of all tensors held at once, largest resident memory) from rollouts to the last micro-batch.

    As in a step: rollouts, with their decoded images, stand beside the experience, and are let go before it is put into
    the buffer. The list of prompts is emptied.
    """
    rollouts = rollouts_of(prompts, samples, tokens)
    prompts.clear()
    experiences = experience_of(rollouts)
    held, highest = sum(storages([rollouts, experiences]).values()), resident()
    rollouts.clear()
    buffer = NaiveReplayBuffer(MICRO_BATCH)
    while experiences:
        buffer.append(experiences[0])
        if len(experiences) % 32 == 1:  # the batch stands in the buffer and, as far as it is left, in experience
            held = max(held, sum(storages([experiences, buffer.items]).values()))
            highest = max(highest, resident())
        experiences.pop(0)
    for step in buffer.plan(0):
        for micro_batch in step:
            loaded = buffer.load(micro_batch)
            highest = max(highest, resident())
            own = storages([loaded])
    return max(held, sum((storages(buffer.items) | own).values())), highest


def compare(a: argparse.Namespace) -> int:
    """Both numbers of samples on the same prompts; 1 where the tensors or the process grow by more than GROWTH."""
    found = []
    for samples in (a.against, a.samples):
        shared = [f"--{name}={getattr(a, name)}" for name in ("prompts", "patches", "prompt", "tokens")]
        command = [sys.executable, __file__, *shared, f"--samples={samples}"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
        print(text, end="")
        found.append([float(number) for number in re.findall(r"(?:held:|rises by) (\d+) MiB", text)])
    ratios = [more / fewer for fewer, more in zip(*found)]
    print(
        f"{a.samples} samples a prompt against {a.against}: {ratios[0]:.3f} x the tensors, {ratios[1]:.3f} x resident"
    )
    return int(max(ratios) > GROWTH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--patches", type=int, default=1200)
    parser.add_argument("--prompt", type=int, default=340)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--against", type=int, help="samples a prompt to compare with")
    a = parser.parse_args()
    if a.against is not None:
        return compare(a)
    before = resident()
    prompts = prompts_of(a.prompts, a.patches, a.prompt)
    images = a.prompts * a.patches * PATCH_WIDTH * 4
    held, highest = through_the_stages(prompts, a.samples, a.tokens)
    print(f"one copy of the images: {images / MIB:.0f} MiB; {a.prompts * a.samples} samples of {a.prompts} prompts")
    print(f"all tensors held: {held / MIB:.0f} MiB, {held / images:.3f} copies")
    print(f"resident memory rises by {(highest - before) / MIB:.0f} MiB, {(highest - before) / images:.3f} copies")
    return 0 if max(held, highest - before) <= LIMIT * images else 1


if __name__ == "__main__":
    sys.exit(main())
