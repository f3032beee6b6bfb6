"""Does an image show the drawn shape that its caption names: the scorer of the embedded diffusion run.

Colour, shape, coverage and background are measured apart and multiplied, so that no one of them can be traded for
another: a flat image has no foreground and scores 0 whatever its colour. Every part is differentiable in the pixels,
which makes the same measure usable for Reward FL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from .drawn_shapes import BACKGROUND, PLACED_SHIFT, colour_table, parse_caption, shape_masks

T = torch.Tensor
PIXELS_AT_ONCE = 2**18  # 256 images of 32 pixels a side: templates of all shapes are drawn for each
PARTS = ("score", "colour", "shape", "coverage", "background", "place")


@dataclass
class Foreground:
    """What stands out from the border of B images: mask (B, H, W) in 0..1, area (B) as a share of the image,
    centre of mass x, y (B) in 0..1, ink (B, 3) its mean colour, paper (B, 3) the colour of the border."""

    mask: T
    area: T
    x: T
    y: T
    ink: T
    paper: T


def find_foreground(images: T) -> Foreground:
    """Split images (B, 3, H, W) in 0..1 (H = W) into a uniform border colour and what differs from it."""
    size = images.shape[-1]
    border = torch.cat([images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]], dim=-1)
    paper = border.median(dim=-1).values
    difference = (images - paper[:, :, None, None]).square().sum(dim=1).add(1e-8).sqrt()
    mask = ((difference - 0.15) / 0.4).clamp(0, 1)
    mass = mask.sum(dim=(1, 2)) + 1e-4
    grid = (torch.arange(size, dtype=images.dtype, device=images.device) + 0.5) / size
    x = (mask.sum(dim=1) * grid).sum(dim=1) / mass
    y = (mask.sum(dim=2) * grid).sum(dim=1) / mass
    ink = (images * mask[:, None]).sum(dim=(2, 3)) / mass[:, None]
    return Foreground(mask, mask.mean(dim=(1, 2)), x, y, ink, paper)


def template_overlap(found: Foreground) -> T:
    """(B, n_shapes): soft intersection over union of the foreground with each shape of its area and centre."""
    masks = shape_masks(found.area, found.x, found.y, found.mask.shape[-1])
    mask = found.mask[:, None]
    union = torch.maximum(mask, masks).sum(dim=(2, 3)) + 1e-4
    return torch.minimum(mask, masks).sum(dim=(2, 3)) / union


def shape_match(images: T, captions: list[str]) -> dict[str, T]:
    """Score images (B, 3, H, W) in 0..1 against B captions such as 'a red circle'.

    Returns float tensors (B) in 0..1: `score` (the product), `colour`, `shape`, `coverage`, `background`, `place` (1
    where the caption names none), and `valid` (bool), false where a caption names no known colour and shape.
    Differentiable in the pixels.
    """
    wanted = [parse_caption(caption) for caption in captions]
    valid = torch.tensor([caption is not None for caption in wanted], device=images.device)
    colours = torch.tensor([caption.colour if caption else 0 for caption in wanted], device=images.device)
    shapes = torch.tensor([caption.shape if caption else 0 for caption in wanted], device=images.device)
    images = images.float() if images.dtype in (torch.float16, torch.bfloat16) else images
    found = find_foreground(images.clamp(0, 1))
    overlap = template_overlap(found)
    target = overlap.gather(1, shapes[:, None])[:, 0]
    others = overlap.scatter(1, shapes[:, None], -1.0).amax(dim=1)
    # A square of the same area already overlaps a circle by 0.83: what counts is to fit better than the other shapes.
    shape = (target / 0.92).clamp(max=1) * torch.sigmoid(40 * (target - others - 0.02))
    distance = (found.ink - colour_table(images)[colours]).square().sum(dim=1).add(1e-8).sqrt()
    colour = ((0.9 - distance) / 0.75).clamp(0, 1)
    coverage = (found.area / 0.06).clamp(max=1) * ((0.6 - found.area) / 0.2).clamp(0, 1)
    background = ((0.6 - (found.paper - BACKGROUND).abs().amax(dim=1)) / 0.45).clamp(0, 1)
    place = _place(found, [None if caption is None else caption.place for caption in wanted])
    return {
        "score": colour * shape * coverage * background * place,
        "colour": colour, "shape": shape, "coverage": coverage, "background": background, "place": place,
        "valid": valid,
    }  # fmt: skip


def _place(found: Foreground, places: list[int | None]) -> T:
    """(B): 1 where the centre of mass is on the named side of the middle, by more than half of what drawings have."""
    named = torch.tensor([-1 if place is None else place for place in places], device=found.x.device)
    right, low = named % 2 * 2 - 1, named // 2 * 2 - 1
    sides = [
        ((centre - 0.5) * sign / (PLACED_SHIFT / 2)).clamp(0, 1) for centre, sign in ((found.x, right), (found.y, low))
    ]
    return torch.where(named < 0, torch.ones_like(found.x), sides[0] * sides[1])


def pixels_of(pictures: Sequence[Any]) -> T:
    """(B, 3, H, W) float32 in 0..1 from PIL images of one size."""
    arrays = [np.asarray(image.convert("RGB"), dtype=np.float32) / 255 for image in pictures]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


class ShapeMatch:
    """The scorer `shape_match` of recipes: one part of the measure, 'score' unless said otherwise.

    None for a caption that names no known colour and shape; the mean over the frames of a video.
    """

    name = "shape_match"
    parts: tuple[str, ...] = PARTS
    measure = staticmethod(shape_match)

    def __init__(self, part: str = "score") -> None:
        if part not in self.parts:
            raise ConfigError(f"{self.name}: part is {part!r}; it must be one of: {', '.join(self.parts)}")
        self.part = part

    def __call__(self, frames: list[list[Any]], prompts: list[str]) -> list[float | None]:
        known = [index for index, prompt in enumerate(prompts) if frames[index] and parse_caption(prompt) is not None]
        found: dict[int, list[float]] = {index: [] for index in known}
        every = [(index, image) for index in known for image in frames[index]]
        for (width, height), alike in groupby(every, lambda each: each[1].size):
            while part := list(islice(alike, max(1, PIXELS_AT_ONCE // (width * height)))):
                indices, images = zip(*part)
                measured = self.measure(pixels_of(images), [prompts[index] for index in indices])
                for index, score in zip(indices, measured[self.part].tolist()):
                    found[index].append(score)
        return [fmean(found[index]) if index in found else None for index in range(len(frames))]


class EmbeddedShapeMatch:
    """The embedded task's measure; a caption without a known colour and shape is invalid."""

    needs = "captions that name a colour and a shape of the embedded drawings"

    def __call__(self, media: T, prompts: list[str], metadata: list[dict[str, Any]]) -> tuple[T, T]:
        """(scores (B) with gradient, valid (B) bool)."""
        found = shape_match(media, prompts)
        return found["score"], found["valid"]

    def knows(self, prompt: str, metadata: dict[str, Any]) -> bool:
        """Whether the caption names both."""
        return parse_caption(prompt) is not None
