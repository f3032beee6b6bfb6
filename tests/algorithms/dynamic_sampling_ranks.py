"""Run by two ranks: dynamic sampling where only the named prompts have rewards that differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from lightrft_visual.algorithms.dynamic_sampling import DynamicSampling, by_group
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout


def collected(
    ranks: int, rank: int, differing: set[int], wanted: int, tries: int, captions: set[int] = frozenset()
) -> tuple[DynamicSampling, list[int]]:
    """(the sampling, its group ids): each round brings wanted * ranks new prompts, every rank its share. captions: the
    prompts that ask for an image."""
    sampling = DynamicSampling(wanted, tries)

    def sample_round(number: int) -> list[Rollout]:
        made = []
        for place in range(wanted):
            prompt = PromptFeatures("", [1], group_id=(number * wanted + place) * ranks + rank)
            prompt.caption = "drawn" if prompt.group_id in captions else None
            rewards = (0.0, 1.0) if prompt.group_id in differing else (0.5, 0.5)
            made += [Rollout(prompt, [2], None, "", False, sample_id=0, reward=reward) for reward in rewards]
        return made

    rollouts = sampling.collect(sample_round)
    assert all(len(group) == 2 for group in by_group(rollouts).values())
    return sampling, list(by_group(rollouts))


def main(out: str, differing: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sampling, ids = collected(dist.get_world_size(), rank, set(json.loads(differing)), wanted=4, tries=4)
    told = {"rounds": sampling.rounds, "filled": sampling.filled, "ids": ids}
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
