"""Gold of the embedded captions: a classifier of drawings, and right drawings to compare with."""

from collections.abc import Sequence
from typing import Any

import torch

from ...observe.guard.divergence import SIDE
from ...rewards.engine import RewardComputationEngine
from ...trainer.diffusion.evaluation import DrawingGold
from .drawn_shapes import parse_caption, random_images
from .shape_judge import embedded_judge, kinds_of

T = torch.Tensor
REFERENCE_SEED = 77


def embedded_gold(rewards: RewardComputationEngine, prompts: Sequence[Any]) -> DrawingGold:
    """The judge tells kinds, and right images are drawn, where all captions are of the embedded ones."""
    if any(parse_caption(row.prompt) is None for row in prompts):
        return DrawingGold(rewards)
    return DrawingGold(rewards, lambda thumbs: kinds_of(embedded_judge(), thumbs.float() / 255), reference_drawings)


def reference_drawings(prompts: Sequence[str]) -> T:
    """uint8 thumbnails (N, 3, SIDE, SIDE): one drawing of each embedded caption, at random sizes and centres, the same
    for the same prompts."""
    captions = [parse_caption(prompt) for prompt in prompts]
    colours, shapes = (torch.tensor([getattr(each, name) for each in captions]) for name in ("colour", "shape"))
    drawn = random_images(colours, shapes, SIDE, torch.Generator().manual_seed(REFERENCE_SEED))
    return (drawn * 255).round().to(torch.uint8)
