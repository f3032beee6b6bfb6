"""DAPO's dynamic sampling (arXiv 2503.14476): keep groups whose rewards differ, sample more prompts for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..batches.rollouts import Rollout
from ..strategy import collectives


@dataclass
class DynamicSampling:
    """Collects groups until `wanted` of them, on each rank, have rewards that differ.

    tries: rounds of sampling at most, the first included. After the last round the batch is filled up with groups of
    equal rewards (they carry no gradient), so that its size stays; how many is counted in `filled`.
    """

    wanted: int
    tries: int
    kept: list[list[Rollout]] = field(default_factory=list)
    spare: list[list[Rollout]] = field(default_factory=list)
    rounds: int = 0
    filled: int = 0

    def collect(self, sample_round: Callable[[int], list[Rollout]]) -> list[Rollout]:
        """Rollouts of `wanted` groups. sample_round(k) samples and scores round k; every rank calls it alike."""
        while True:
            for group in by_group(sample_round(self.rounds)):
                (self.kept if is_informative(group) else self.spare).append(group)
            self.rounds += 1
            missing = torch.tensor([max(0, self.wanted - len(self.kept))])
            if self.rounds >= self.tries or collectives.all_reduce_max(missing).item() == 0:
                break
        self.filled = max(0, self.wanted - len(self.kept))
        groups = (self.kept + self.spare)[: self.wanted]
        return [rollout for group in groups for rollout in group]


def by_group(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Rollouts of each prompt together, by group id, in order of first appearance."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.group_id, []).append(rollout)
    return list(groups.values())


def is_informative(group: list[Rollout]) -> bool:
    """Whether the valid rewards of a group differ."""
    rewards = [rollout.reward for rollout in group if rollout.valid]
    return len(rewards) > 1 and max(rewards) > min(rewards)
