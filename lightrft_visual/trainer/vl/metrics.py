"""What a step's experience says in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...batches.experience import Experience
from ...observe.metrics import MetricsAccumulator
from ...strategy import collectives

_NOTED = ("comparable", "shaped_reward", "advantage_clip_frac", "overlong_penalty", "reward_clipped")


def add_rollout_metrics(metrics: MetricsAccumulator, experiences: Sequence[Experience]) -> None:
    """Rewards, lengths, KL, entropy and advantages of this rank's micro-batches (B, A)."""
    for each in experiences:
        valid = each.valid.bool()
        metrics.add_moments("reward", each.info["reward"][valid])
        metrics.add_mean("reward_invalid_share", (~valid).float())
        metrics.add_mean("response_length", each.info["response_length"])
        metrics.add_mean("truncated_share", each.info["truncated"])
        metrics.add_total("tokens", each.info["total_length"].sum())
        metrics.add_mean("kl", each.kl, each.action_mask)
        metrics.add_mean("entropy", each.action_entropy, each.action_mask)
        metrics.add_mean("advantage_abs", each.advantages.abs(), each.action_mask)
        for name in _NOTED:
            if name in each.info:
                metrics.add_mean(name, each.info[name])
        for name, values in each.info["reward_metrics"].items():
            metrics.add_mean(f"reward/{name}", values, ~values.isnan())
    _add_groups(metrics, experiences)


def _add_groups(metrics: MetricsAccumulator, experiences: Sequence[Experience]) -> None:
    """Share of groups whose valid rewards are all equal: they teach nothing."""
    rewards = torch.cat([each.info["reward"] for each in experiences])
    groups = torch.cat([each.group_id for each in experiences])
    valid = torch.cat([each.valid.bool() for each in experiences])
    for group in groups.unique():
        own = rewards[(groups == group) & valid]
        metrics.add("zero_std_ratio", float(len(own) < 2 or bool(own.max() == own.min())))


def kl_per_token(experiences: Sequence[Experience]) -> tuple[float, int]:
    """(mean KL to the reference over all response tokens, number of samples) of all ranks. A collective."""
    parts = [torch.stack([each.kl.double().sum(), each.action_mask.double().sum()]) for each in experiences]
    samples = torch.tensor([float(sum(len(each.kl) for each in experiences))], dtype=torch.float64)
    total, tokens, count = collectives.all_reduce_sum(torch.cat([torch.stack(parts).sum(dim=0), samples])).tolist()
    return total / max(tokens, 1.0), int(count)
