"""The vision tower runs once for each different image or video of a batch, however many samples show it.

The G completions of one prompt carry the same pixels. A tower without batch statistics gives equal pixels equal
features, so the copies are looked up instead of computed; their gradients add up in the one that was.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn as nn

T = torch.Tensor

# Values of an image that are looked at before two images are compared in full.
_PROBES = 64


def share_repeated_media(vision_tower: nn.Module) -> None:
    """Make a Qwen-VL vision tower (`pixel_values` (patches, D), `grid_thw` (media, 3)) skip repeated media."""
    sharing = _Sharing()
    vision_tower.register_forward_pre_hook(sharing.before, with_kwargs=True)
    vision_tower.register_forward_hook(sharing.after)


def share_repeated_images(vision_tower: nn.Module) -> None:
    """The same for a tower that takes `pixel_values` (images or tiles, C, H, W) alone: one row in, one row out."""
    sharing = _SharingImages()
    vision_tower.register_forward_pre_hook(sharing.before, with_kwargs=True)
    vision_tower.register_forward_hook(sharing.after)


def first_occurrences(pixels: T, grids: T) -> list[int]:
    """For each medium the index of the first equal one, itself where there is none before it.

    pixels is (sum of patches, D); grids (media, 3) holds frames, rows and columns of patches. Media are equal when
    their grids and every value are: a flat image has the same values in another shape, but other positions.
    """
    blocks = pixels.detach().split(grids.prod(dim=1).tolist())
    step = [max(1, block.numel() // _PROBES) for block in blocks]
    probes = [block.reshape(-1)[::every][:_PROBES] for block, every in zip(blocks, step)]
    keys = torch.stack([nn.functional.pad(probe, (0, _PROBES - len(probe))) for probe in probes]).cpu().tolist()
    seen: dict[tuple, list[int]] = defaultdict(list)
    first: list[int] = []
    for index, (block, grid, key) in enumerate(zip(blocks, grids.tolist(), keys)):
        alike = seen[*grid, *key]
        found = next((other for other in alike if torch.equal(blocks[other], block)), index)
        if found == index:
            alike.append(index)
        first.append(found)
    return first


class _Sharing:
    """The two hooks, and what the first tells the second: which rows of the output each medium takes."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.plan = None
        others = [value for name, value in kwargs.items() if name != "grid_thw"]
        if len(args) != 1 or kwargs.get("grid_thw") is None or any(isinstance(each, T) for each in others):
            return None  # not called as transformers' get_image_features does: offsets of the media may be among these
        pixels, grids = args[0], kwargs["grid_thw"]
        patches = grids.prod(dim=1).tolist()
        if len(patches) < 2 or sum(patches) != len(pixels):
            return None
        first = first_occurrences(pixels, grids)
        kept = sorted(set(first))
        if len(kept) == len(first):
            return None
        blocks = pixels.split(patches)
        self.plan = _Plan(patches, first, kept)
        fewer = torch.cat([blocks[index] for index in kept])
        return (fewer,), kwargs | {"grid_thw": grids[torch.tensor(kept, device=grids.device)]}

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        plan, self.plan = self.plan, None
        if plan is None:
            return output
        if isinstance(output, torch.Tensor):
            return plan.repeated(output)
        for name, value in list(output.items()):
            if isinstance(value, torch.Tensor):
                output[name] = plan.repeated(value)
            elif isinstance(value, (list, tuple)):
                output[name] = type(value)(plan.repeated(each) for each in value)
        return output


class _SharingImages(_Sharing):
    """The hooks of a tower whose input is one row for each image or tile."""

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self.plan = None
        pixels = kwargs.get("pixel_values")
        if pixels is None or args or len(pixels) < 2:
            return None
        first = first_occurrences(pixels, torch.ones(len(pixels), 3, dtype=torch.long))
        kept = sorted(set(first))
        if len(kept) == len(first):
            return None
        self.plan = _Plan([1] * len(first), first, kept)
        return args, kwargs | {"pixel_values": pixels[torch.tensor(kept, device=pixels.device)]}


class _Plan:
    """patches rows of input a medium; first: which medium it repeats; kept: the media that were computed."""

    def __init__(self, patches: list[int], first: list[int], kept: list[int]):
        self.patches, self.first, self.kept = patches, first, kept

    def repeated(self, features: T) -> T:
        """Features (rows of the kept media, H), one row a patch or one a merged group, for all media."""
        total = sum(self.patches[index] for index in self.kept)
        merge = total // len(features)
        position = {index: number for number, index in enumerate(self.kept)}
        blocks = features.split([self.patches[index] // merge for index in self.kept])
        return torch.cat([blocks[position[index]] for index in self.first])
