"""Memory of what takes most of it beside the models: a step's batch, log-probs, a decoder with a gradient.

    python scripts/bench/memory.py host [--prompts 128] [--samples 16] [--patches 1200] [--prompt 340] [--tokens 128]
    python scripts/bench/memory.py logprobs [--tokens 8192] [--vocabulary 152064] [--hidden 64]
    python scripts/bench/memory.py decoder [--height 480] [--width 832] [--frames 9] [--rounds 3]

host: a batch against one copy of its images. Decoded images go through the processor of Qwen2.5-VL as in a run. Prints
the bytes of all different tensors that the stages' objects hold together, and for each stage the largest memory that
the process had filled in it, above what it had before there were images. Exit code 1 above 1.2 copies of the patches.

logprobs: peak of log-probs, entropy and their backward, in chunks (`linear_log_probs`) and plain. The chunked form runs
in a process of its own, and its peak is what the process grew by. The plain form wants about 38 GB: it is counted on
meta tensors, temporaries inside operators left out, in its favour. Values and gradients are compared, the plain form in
slices. Exit code 1 where the chunked peak is above 1/8 of the plain one, or a difference above 1e-5.

decoder: what decoding holds for Wan's VAE, kept until backward and at most while backward runs, on meta tensors in
bf16. Time is of the processor, of 64 x 64 pixels in fp32, the ratio of alternating runs. Whole: nothing is computed
again; frames: latent frames are; blocks: also the blocks of each while it is computed again.
"""

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from torch import nn

from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.rollouts import PromptBatch, PromptFeatures, Rollout, collate, release_media
from lightrft_visual.models.diffusion import prompt_cache as decoding
from lightrft_visual.models.logprobs import linear_log_probs
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.runtime.host_memory import give_back_freed_memory, keep_freed_memory

PATCH_WIDTH = 3 * 2 * 14 * 14  # channels, frames and pixels of a patch of Qwen2-VL and Qwen2.5-VL
WIDTH = 20  # patches; rows and columns are even
MICRO_BATCH = 8
LIMIT = 1.2  # copies of the patches
SLICE = 512  # tokens of the plain form
WAYS = ("whole", "frames", "blocks")
MIB = 2**20
T = torch.Tensor


def resident(*names: str) -> int:
    """Bytes of this process in lines of its status. RssAnon and VmSwap are those that it has filled itself, swapped out
    or not: pages of files, such as libraries, the kernel takes back as others need room."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in names) * 1024


class Peaks:
    """The largest resident memory of each stage above that of the beginning, read every two milliseconds."""

    def __init__(self) -> None:
        self.base, self.bytes = resident("RssAnon", "VmSwap"), {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage, which may be entered again."""
        inside = True

        def watch() -> None:
            while inside:
                self.bytes[name] = max(self.bytes.get(name, 0), resident("RssAnon", "VmSwap") - self.base)
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


def host(asked: argparse.Namespace) -> bool:
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
    return max(held, *peaks.bytes.values()) <= LIMIT * images


def scored(form: Any, states: T, weight: T, targets: T, total: int) -> tuple[T, T]:
    """(log_probs, entropy) of one form, after the backward pass of their mean over `total` tokens."""
    log_probs, entropy = form(states, weight, targets, temperature=0.9)
    ((log_probs.sum() + 0.1 * entropy.sum()) / total).backward()
    return log_probs.detach(), entropy.detach()


def scored_inputs(tokens: int, vocabulary: int, hidden: int) -> tuple[T, T, T]:
    make = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=make).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=make) / hidden**0.5).requires_grad_()
    return states, weight, torch.randint(0, vocabulary, (tokens,), generator=make)


def measure_chunked(shape: tuple[int, int, int]) -> None:
    """Print by how many bytes this process grows."""
    inputs = scored_inputs(*shape)
    scored(linear_log_probs, *scored_inputs(2, 100, shape[2]), 2)  # threads and caches of the first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    scored(linear_log_probs, *inputs, shape[0])
    print(resident("VmHWM") - before)


def plain_log_probs(states: T, weight: T, targets: T, temperature: float) -> tuple[T, T]:
    """What `linear_log_probs` computes in chunks, with all logits in memory."""
    logits = states @ weight.t() / temperature
    entropy = logits.logsumexp(dim=1) - (logits.softmax(dim=1) * logits).sum(dim=1)
    return logits.log_softmax(dim=1).gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def counted_plain(tokens: int, vocabulary: int, hidden: int) -> int:
    from lightrft_visual.plugins.memory_plan.meta import held_bytes, on_meta

    head = on_meta(lambda: nn.Linear(hidden, vocabulary, bias=False))
    states = torch.empty(tokens, hidden, device="meta", requires_grad=True)
    targets = torch.empty(tokens, dtype=torch.long, device="meta")
    run = lambda: torch.stack(plain_log_probs(states, head.weight, targets, temperature=0.9))  # noqa: E731
    return held_bytes(head, run, backward=True).peak


def differences(shape: tuple[int, int, int]) -> dict[str, float]:
    """Largest absolute difference of values and gradients between the forms, over all tokens."""
    states, weight, targets = scored_inputs(*shape)
    outputs = scored(linear_log_probs, states, weight, targets, shape[0])
    gradients = states.grad, weight.grad
    states.grad = weight.grad = None
    parts = [slice(start, start + SLICE) for start in range(0, shape[0], SLICE)]
    pieces = [scored(plain_log_probs, states[part], weight, targets[part], shape[0]) for part in parts]
    expected = [torch.cat(each) for each in zip(*pieces)] + [states.grad, weight.grad]
    names = ("log_probs", "entropy", "hidden gradient", "weight gradient")
    return {name: (a - b).abs().max().item() for name, a, b in zip(names, (*outputs, *gradients), expected)}


def logprobs(asked: argparse.Namespace) -> bool:
    shape = (asked.tokens, asked.vocabulary, asked.hidden)
    if asked.child:
        measure_chunked(shape)
        return True
    done = subprocess.run([sys.executable, *sys.argv, "--child"], check=True, capture_output=True, text=True)
    chunked, plain = int(done.stdout.splitlines()[-1]), counted_plain(*shape)
    print(f"{chunked / MIB:.0f} MiB in chunks, {plain / MIB:.0f} MiB plain (1 / {plain / chunked:.1f})")
    largest = differences(shape)
    for name, value in largest.items():
        print(f"largest difference of {name}: {value:.2e}")
    return chunked <= plain / 8 and max(largest.values()) <= 1e-5


def made(way: str, build) -> AutoencoderKLWan:
    """A decoder that computes again as the way says."""
    vae = build().eval().requires_grad_(False)
    if way == "frames":
        vae.decoder.forward = decoding.checkpointed_part(vae.decoder.forward)
    if way == "blocks":
        decoding.checkpoint_decoder(vae)
    return vae


def latents(vae: AutoencoderKLWan, height: int, width: int, frames: int) -> torch.Tensor:
    """That decode to so many frames of this size."""
    like = next(vae.parameters())
    shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height // 8, width // 8)
    return torch.zeros(shape, dtype=like.dtype, device=like.device, requires_grad=True)


def decoded(vae: AutoencoderKLWan, given: torch.Tensor) -> torch.Tensor:
    """The frames."""
    return vae.decode(given, return_dict=False)[0]


def seconds(vae: AutoencoderKLWan) -> float:
    """Of one decoding and its backward."""
    given, began = latents(vae, 64, 64, 5), time.process_time()
    decoded(vae, given).square().sum().backward()
    return time.process_time() - began


def decoder(asked: argparse.Namespace) -> bool:
    from lightrft_visual.plugins.memory_plan.meta import held_bytes, on_meta

    print("| computed again | kept, GB | most in backward, GB |\n|---|---|---|")
    for way in WAYS:
        vae = made(way, lambda: on_meta(AutoencoderKLWan).bfloat16())
        given = latents(vae, asked.height, asked.width, asked.frames)
        held = held_bytes(vae, partial(decoded, vae, given), backward=True)
        print(f"| {way} | {held.kept / 1e9:.2f} | {held.peak / 1e9:.2f} |", flush=True)
    torch.set_num_threads(1)
    decoders = {way: made(way, AutoencoderKLWan) for way in WAYS}
    times = {way: [] for way in WAYS}
    for _ in range(asked.rounds):
        for way, vae in decoders.items():
            times[way].append(seconds(vae))
    print(", ".join(f"{way} {median(times[way]) / median(times['whole']):.2f}" for way in WAYS), "of the time of whole")
    return True


WHAT = {
    "host": (host, {"prompts": 128, "samples": 16, "patches": 1200, "prompt": 340, "tokens": 128}),
    "logprobs": (logprobs, {"tokens": 8192, "vocabulary": 152_064, "hidden": 64}),
    "decoder": (decoder, {"height": 480, "width": 832, "frames": 9, "rounds": 3}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    for name, (_, numbers) in WHAT.items():
        own = kinds.add_parser(name)
        own.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
        for number, default in numbers.items():
            own.add_argument(f"--{number}", type=int, default=default)
    asked = parser.parse_args()
    return int(not WHAT[asked.what][0](asked))


if __name__ == "__main__":
    sys.exit(main())
