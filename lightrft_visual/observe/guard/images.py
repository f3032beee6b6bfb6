"""What a set of images looks like in numbers that no reward decides: variety, coverage, colours, edges, blankness.

All of it is measured on thumbnails, so it costs next to nothing beside drawing and scoring, and all ranks can have
everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

T = torch.Tensor
SIDE = 32  # pixels of a thumbnail
LEVELS = 4  # of each colour channel in the histogram of colours
BLANK = 0.03  # standard deviation of pixels below which an image shows nothing
COVERING = 2  # which nearest neighbour of a reference image bounds what covers it


def thumbnails(media: T) -> T:
    """uint8 (N, 3, SIDE, SIDE) of images (N, 3, H, W) in 0..1, or of the middle frame of videos (N, 3, T, H, W)."""
    images = media[:, :, media.shape[2] // 2] if media.dim() == 5 else media
    images = images.detach().float().cpu()
    if images.shape[-2:] != (SIDE, SIDE):
        images = F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True)
    return (images.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def distances(one: T, two: T) -> T:
    """(N, M) root mean square difference of thumbnails (N, 3, S, S) and (M, 3, S, S), in units of full brightness.

    Their bytes and the sums of their products are whole numbers, which float64 holds exactly: one matrix product
    suffices.
    """
    first, second = (each.flatten(1).double() for each in (one, two))
    squares = first.square().sum(dim=1)[:, None] + second.square().sum(dim=1) - 2 * first @ second.T
    return (squares.sqrt() / (255 * first.shape[1] ** 0.5)).float()


def diversity(thumbs: T, groups: T, kinds: T | None = None) -> float:
    """Mean distance of the pairs of images (N, 3, S, S) in a group (N); NaN where no group has two.

    kinds (N): what an image shows; then only pairs that show the same count. An image that shows the right thing more
    often resembles its neighbours more, which is no loss of variety: variety is what is left among equals.
    """
    pairs = groups[:, None] == groups
    if kinds is not None:
        pairs = pairs & (kinds[:, None] == kinds)
    pairs = pairs.triu(diagonal=1)
    return distances(thumbs, thumbs)[pairs].mean().item() if bool(pairs.any()) else float("nan")


def groups_of(prompts: Sequence[str]) -> T:
    """(N): the index at which each prompt stands first, for evaluations that draw a prompt several times."""
    first: dict[str, int] = {}
    return torch.tensor([first.setdefault(prompt, index) for index, prompt in enumerate(prompts)])


def drift(thumbs: T, base: T) -> float:
    """Mean root mean square difference of each image (N, 3, S, S) from its own counterpart."""
    return ((thumbs.float() - base.float()) / 255).square().mean(dim=(1, 2, 3)).sqrt().mean().item()


def coverage(thumbs: T, groups: T, references: T, reference_groups: T) -> float:
    """Share of reference images that some image of their group covers: it lies within the distance of the reference's
    COVERING-th nearest neighbour among the references of the group ("coverage", arXiv 2002.09797)."""
    among = distances(references, references).masked_fill(reference_groups[:, None] != reference_groups, torch.inf)
    radius = among.sort(dim=1).values[:, min(COVERING, len(references) - 1)]  # 0 is the image itself
    nearest = distances(references, thumbs).masked_fill(reference_groups[:, None] != groups, torch.inf).amin(dim=1)
    return (nearest <= radius).float().mean().item()


def image_statistics(thumbs: T, groups: T) -> dict[str, float]:
    """Of thumbnails (N, 3, S, S) with their groups (N): `image_diversity` within groups (left out where there are no
    pairs), and means over images of `image_colours` (entropy of the histogram of LEVELS³ colours, bits), `image_edges`
    (mean difference of neighbouring pixels), `image_brightness`, and `image_blank`, the share of images whose pixels
    are all but equal."""
    images = thumbs.float() / 255
    varied = diversity(thumbs, groups)
    edges = (images.diff(dim=2).abs().mean(dim=(1, 2, 3)) + images.diff(dim=3).abs().mean(dim=(1, 2, 3))) / 2
    found = {
        "image_colours": colour_entropy(thumbs).mean().item(),
        "image_edges": edges.mean().item(),
        "image_brightness": images.mean().item(),
        "image_blank": (images.flatten(2).std(dim=2).mean(dim=1) < BLANK).float().mean().item(),
    }
    return found | ({"image_diversity": varied} if varied == varied else {})


def colour_entropy(thumbs: T) -> T:
    """(N) bits: entropy of the LEVELS³ colours that the pixels of each image (N, 3, S, S) have."""
    level = (thumbs // (256 // LEVELS)).flatten(2).long()
    colour = (level[:, 0] * LEVELS + level[:, 1]) * LEVELS + level[:, 2]
    image = torch.arange(len(thumbs))[:, None] * LEVELS**3
    counts = torch.bincount((colour + image).flatten(), minlength=len(thumbs) * LEVELS**3).view(len(thumbs), -1)
    shares = counts / counts.sum(dim=1, keepdim=True)
    return torch.special.entr(shares).sum(dim=1) / torch.log(torch.tensor(2.0))


def gathered(media: T, groups: T, gather: Callable[[Any], list[Any]]) -> tuple[T, T]:
    """Thumbnails and groups of the images of all ranks; gather: one object of each rank to all of them."""
    parts = gather((thumbnails(media).numpy(), groups.tolist()))
    thumbs = torch.cat([torch.from_numpy(each) for each, _ in parts])
    return thumbs, torch.tensor([group for _, part in parts for group in part])
