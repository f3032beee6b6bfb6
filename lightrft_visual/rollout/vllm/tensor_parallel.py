"""Tensor-parallel groups of engine workers: what one rank wants generated, all ranks of its group submit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import ConfigError
from ...experience.rollouts import PromptFeatures
from ...experience.vision import VisionTensors
from ...runtime import collectives


class PromptSharing:
    """Puts the prompts of `size` neighbouring ranks together, in rank order, the same list on each of them.

    The ranks of one engine must run the same scheduling decisions, so they must be given the same prompts. A collective
    of all ranks of the run at construction. Raises ConfigError when the ranks do not divide into groups.
    """

    def __init__(self, size: int):
        world = collectives.world_size()
        if world % size:
            raise ConfigError(f"engine_tp_size {size} does not divide {world} rank(s)")
        self.size, self.group = size, collectives.neighbours(size)

    def share(self, prompts: Sequence[PromptFeatures]) -> tuple[list[PromptFeatures], slice]:
        """(prompts of the whole group, where this rank's are among them). What no engine reads stays behind: patches,
        as engines make theirs, and what only rewards ask for."""
        own = [replace(each, vision=VisionTensors(), reference=None, label=None, metadata={}) for each in prompts]
        if self.group is None:
            return own, slice(0, len(own))
        gathered = collectives.all_gather_object(own, self.group)
        index = collectives.rank() % self.size
        start = sum(len(each) for each in gathered[:index])
        return [prompt for each in gathered for prompt in each], slice(start, start + len(own))
