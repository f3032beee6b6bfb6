"""What decoding with a gradient holds, for Wan's VAE: kept until backward, and at most while backward runs.

    python scripts/bench/decoder_memory.py [--height 480] [--width 832] [--frames 9]

Memory is counted on meta tensors, in bf16: storages that live, as PyTorch itself makes and frees them. Time is
processor time on the CPU, of 64 x 64 pixels in fp32, the ratio of alternating runs. Whole: nothing is computed again;
frames: latent frames are; blocks: also the blocks of each while it is computed again.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import torch
from diffusers import AutoencoderKLWan

from lightrft_visual.models.diffusion import prompt_cache as decoding
from lightrft_visual.plugins.memory_plan.meta import held_bytes, on_meta

WAYS = ("whole", "frames", "blocks")


def made(way: str, build) -> AutoencoderKLWan:
    """A decoder that computes again as the way says."""
    vae = build().eval().requires_grad_(False)
    if way == "frames":
        vae.decoder.forward = decoding.checkpointed_frame(vae.decoder.forward)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("height", 480), ("width", 832), ("frames", 9), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
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


if __name__ == "__main__":
    main()
