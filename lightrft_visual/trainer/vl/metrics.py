"""What a step's experience says in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...config import registry
from ...experience.types import Experience
from ...observe.metrics import MetricsAccumulator
from ...runtime import collectives


def _entropy(experience: Experience):
    """None where it comes with the training forward."""
    return None if experience.action_entropy is None else (experience.action_entropy, experience.action_mask)


def _teacher_kl(experience: Experience):
    """None without a teacher."""
    if experience.teacher_log_probs is None:
        return None
    return experience.action_log_probs - experience.teacher_log_probs, experience.action_mask


# name -> what it is, and its values of one micro-batch; a plugin's stand beside them in the registry.
for _name, _about, _read in (
    ("reward_invalid_share", "share of samples without a usable reward", lambda e: (~e.valid.bool()).float()),
    ("response_length", "tokens of a response", lambda e: e.info["response_length"]),
    ("truncated_share", "share of responses cut at generate_max_len", lambda e: e.info["truncated"]),
    ("kl", "KL to the reference, per token", lambda e: (e.kl, e.action_mask)),
    ("entropy", "of the token distribution, nats", _entropy),
    ("teacher_kl", "KL(policy || teacher) per sampled token", _teacher_kl),
    ("advantage_abs", "size of the advantages", lambda e: (e.advantages.abs(), e.action_mask)),
    ("comparable", "share of samples in groups of two valid ones or more", lambda e: e.info.get("comparable")),
    ("shaped_reward", "reward after penalty, norm and clip", lambda e: e.info.get("shaped_reward")),
    ("advantage_clip_frac", "share of advantages beyond advantage_clip", lambda e: e.info.get("advantage_clip_frac")),
    ("overlong_penalty", "for length", lambda e: e.info.get("overlong_penalty")),
    ("reward_clipped", "share of rewards beyond reward_clip", lambda e: e.info.get("reward_clipped")),
):
    registry.rollout_metrics.register(_name, _about)(_read)


def add_rollout_metrics(
    metrics: MetricsAccumulator, experiences: Sequence[Experience], parts: Sequence[str] = ("",)
) -> None:
    """Rewards, tokens, and every rollout metric of the registry, of this rank's micro-batches (B, A).

    parts: names of the parts of the loss; where there are several, some metrics are also of each.
    """
    for each in experiences:
        metrics.add_moments("reward", each.info["reward"][each.valid.bool()])
        if len(parts) > 1:
            _add_parts(metrics, each, parts)
        metrics.add_total("tokens", each.info["total_length"].sum())
        for entry in registry.rollout_metrics:
            values = entry.load()(each)
            if values is not None:
                metrics.add_mean(entry.name, *(values if isinstance(values, tuple) else (values,)))
        for name, values in each.info["reward_metrics"].items():
            metrics.add_mean(f"reward/{name}", values, ~values.isnan())
    _add_groups(metrics, experiences)


def _add_parts(metrics: MetricsAccumulator, experience: Experience, parts: Sequence[str]) -> None:
    """The reward, and the entropy where it is known, of each part by itself."""
    for number, name in enumerate(parts):
        own = experience.info["loss_part"] == number
        if own.any():
            metrics.add_moments(f"reward_{name}", experience.info["reward"][experience.valid.bool() & own])
            if experience.action_entropy is not None:
                mask = experience.action_mask & own.unsqueeze(1)
                metrics.add_mean(f"entropy_{name}", experience.action_entropy, mask)


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
