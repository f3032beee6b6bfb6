"""Gold: a judgement of images that training never sees, with the variety and the coverage of a set of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...plugins.embedded.drawn_shapes import parse_caption, random_images
from ...plugins.embedded.shape_judge import embedded_judge, kinds_of
from ...rewards.engine import RewardComputationEngine
from .images import SIDE, coverage, diversity, groups_of

T = torch.Tensor
EMBEDDED_GOLD = '{"*": [["rule", "shape_judge", 1.0]]}'
REFERENCE_SEED = 77


@dataclass
class DrawingGold:
    """rewards: scores an image (or text) against its prompt. Of images whose kinds can be told apart also:

    kinds: uint8 thumbnails (N, 3, S, S) to what each shows (N). references: prompts (N) to thumbnails (N, 3, S, S) of
    one right image each, in fixed order.
    """

    rewards: RewardComputationEngine
    kinds: Callable[[T], T] | None = None
    references: Callable[[Sequence[str]], T] | None = None

    def of_set(self, thumbs: T, prompts: Sequence[str]) -> dict[str, float]:
        """`eval_diversity` and, with references, `eval_coverage` of thumbnails (N, 3, S, S); images of one prompt are a
        group. A prompt that stands once has no pairs: `eval_diversity` is left out where all do."""
        groups = groups_of(prompts)
        varied = diversity(thumbs, groups, self.kinds(thumbs) if self.kinds is not None else None)
        found = {"eval_diversity": varied} if varied == varied else {}
        if self.references is not None:
            found["eval_coverage"] = coverage(thumbs, groups, self.references(prompts), groups)
        return found


def embedded_gold(rewards: RewardComputationEngine) -> DrawingGold:
    """Gold of the embedded captions: the judge tells kinds, and right images are drawn."""
    return DrawingGold(rewards, lambda thumbs: kinds_of(embedded_judge(), thumbs.float() / 255), reference_drawings)


def reference_drawings(prompts: Sequence[str]) -> T:
    """uint8 thumbnails (N, 3, SIDE, SIDE): one drawing of each embedded caption, at random sizes and centres, the same
    for the same prompts."""
    captions = [parse_caption(prompt) for prompt in prompts]
    colours, shapes = (torch.tensor([getattr(each, name) for each in captions]) for name in ("colour", "shape"))
    drawn = random_images(colours, shapes, SIDE, torch.Generator().manual_seed(REFERENCE_SEED))
    return (drawn * 255).round().to(torch.uint8)
