"""The same samples beside themselves with their images hidden: what the policy says without seeing.

A hidden patch is zero in the model's input, which is the mean colour after the processor's normalisation. In whole
images it is a little more: Idefics and SmolVLM leave out images that are all zero, which they take for padding.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...experience.types import ModelInputs
from ...experience.vision import PATCHES, Named, VisionTensors, parts_of
from ...runtime.host_copies import known_on_host, on_host, to_device
from ...runtime.seeding import derive_seed
from .actor import ActorOutput
from .vision_cache import with_again

T = torch.Tensor
TILE = 14  # pixels: side of the squares that are hidden in media which come as whole images
HIDDEN = 1e-4  # value of their pixels; far below one step of 255


def hide_patches(vision: VisionTensors, share: float, seeds: Sequence[int]) -> VisionTensors:
    """The same media with random patches hidden.

    Args:
        vision: of the samples.
        share: of the patches of each tensor, at least one; 1 hides all of them.
        seeds: one for each entry of `vision.samples`; entries that are one and the same dict get the first one's.
    """
    made: dict[int, Named] = {}
    for sample, seed in zip(vision.samples, seeds, strict=True):
        for number, part in enumerate(parts_of(sample)):
            behind = (number,) if number else ()  # what a group shares is hidden alike
            if id(part) not in made:
                made[id(part)] = {
                    name: _hidden(value, share, derive_seed(seed, "hidden patches", name, *behind))
                    if name in PATCHES
                    else value
                    for name, value in part.items()
                }
    return vision.with_parts(made)


def _hidden(pixels: T, share: float, seed: int) -> T:
    """pixels: patches (..., D), which are hidden whole, or images or frames (..., C, H, W), in which squares are.

    Made on the host where it knows them, which then also knows without the device which of the hidden ones are equal.
    """
    device, known = pixels.device, known_on_host(pixels)
    pixels = pixels if known is None else known
    if pixels.dim() < 4:
        kept = _kept(pixels.shape[:-1], share, seed).to(pixels.dtype)
        return to_device(pixels * to_device(kept, pixels.device).unsqueeze(-1), device)
    height, width = pixels.shape[-2:]
    grid = (len(pixels), -(-height // TILE), -(-width // TILE))
    kept = _kept(grid, share, seed).repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, :height, :width]
    shape = len(pixels), *[1] * (pixels.dim() - 3), height, width
    return to_device(pixels.where(to_device(kept, pixels.device).view(shape), HIDDEN), device)


def _kept(shape: tuple[int, ...], share: float, seed: int) -> T:
    """Bool of `shape`, false for round(share * size) elements, at least one."""
    size = torch.Size(shape).numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed % 2**63))
    kept = torch.ones(size, dtype=torch.bool)
    kept[order[: max(1, round(share * size))]] = False
    return kept.view(shape)


def beside_hidden(inputs: ModelInputs, share: float, seed: int) -> ModelInputs:
    """2 B samples: those of `inputs`, then the same ones with patches hidden.

    One forward of both keeps ranks in step, and costs no more than two.

    Args:
        inputs: of B samples, padded or packed.
        share: as of `hide_patches`.
        seed: what is hidden depends on it and the group alone, so the samples of a prompt go on sharing it.
    """
    vision, count = inputs.vision, len(inputs.action_mask)
    groups = [0] * count if inputs.group_ids is None else on_host(inputs.group_ids).tolist()
    seeds = [derive_seed(seed, "hidden", group) for group in groups[: len(vision.samples)]]
    both = VisionTensors.gather([vision, hide_patches(vision, share, seeds)])
    return replace(with_again(inputs, [*range(count)]).to(inputs.sequences.device), vision=both)


def halves(output: ActorOutput) -> tuple[ActorOutput, ActorOutput]:
    """The outputs (B, A) for the samples as they are, and for those with hidden patches, of `beside_hidden`'s."""
    scores = output.log_probs.chunk(2)
    entropies = (None, None) if output.entropy is None else output.entropy.chunk(2)
    return ActorOutput(scores[0], entropies[0]), ActorOutput(scores[1], entropies[1])
