"""The pairs of Diffusion-DPO (its loss: `preference.py`): a preferred and another image of one prompt."""

import torch

from ...runtime.collectives import all_gather_object, rank
from .advantages import group_metrics

T = torch.Tensor
PAIR = 2


def ranked_pairs(rewards: T, group_id: T, valid: T) -> tuple[T, T]:
    """(N) signs and (N) pair ids: in each group the best with the worst, the second best with the second worst, ...

    Args:
        rewards: (N) float.
        group_id: (N) long.
        valid: (N) bool.

    Returns:
        Signs, 1 for the better and -1 for the other sample, 0 of pairs of equal rewards or with an invalid sample; and
        ids, from 0 on.

    Raises:
        ValueError: a group has an odd number of samples.
    """
    signs, pairs, number = torch.zeros(len(rewards)), torch.zeros(len(rewards), dtype=torch.long), 0
    for group in torch.unique(group_id):
        members = (group_id == group).nonzero()[:, 0]
        if len(members) % PAIR:
            raise ValueError(f"a group has {len(members)} samples: pairs need an even number")
        worth = torch.where(valid[members], rewards[members].double(), -torch.inf)
        ranked, count = members[worth.argsort(descending=True, stable=True)], int(valid[members].sum())
        half = count // 2
        matched = list(zip(ranked[:half].tolist(), ranked[count - half : count].flip(0).tolist()))
        left = [*ranked[half : count - half].tolist(), *ranked[count:].tolist()]
        for index, (first, second) in enumerate([*matched, *zip(left[::2], left[1::2])]):
            counts = index < half and bool(rewards[first] > rewards[second])
            signs[first], signs[second] = float(counts), -float(counts)
            pairs[first] = pairs[second] = number
            number += 1
    return signs, pairs


def gathered_pairs(rewards: T, group_id: T, valid: T) -> tuple[T, T, dict[str, float]]:
    """This rank's signs and pair ids of `ranked_pairs` over all ranks, and the metrics of the batch. A collective.

    Args:
        rewards: (B) of this rank.
        group_id: (B) of their prompts.
        valid: (B) bool; others are in no pair.
    """
    everyone = all_gather_object((rewards.cpu(), group_id.cpu(), valid.cpu()))
    gathered = [torch.cat(parts) for parts in zip(*everyone)]
    signs, pairs = ranked_pairs(*gathered)
    start = sum(len(each[0]) for each in everyone[: rank()])
    mine = slice(start, start + len(rewards))
    metrics = group_metrics(*gathered) | {"pairs": float(signs.clamp(min=0).sum())}
    return signs[mine], pairs[mine], metrics
