"""Gold: a judgement of images that training never sees, with the variety and the coverage of a set of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...observe.guard.images import coverage, diversity, groups_of
from ...rewards.engine import RewardComputationEngine

T = torch.Tensor


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
