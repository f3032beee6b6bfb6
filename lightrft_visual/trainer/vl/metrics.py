"""What a step's experience says in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...batches.experience import Experience
from ...batches.rollouts import Rollout
from ...config import registry
from ...guard.gains import Look, look_of
from ...guard.images import SIDE, gathered, image_statistics
from ...guard.texts import text_statistics
from ...observe.metrics import MetricsAccumulator
from ...rewards.engine import RewardComputationEngine
from ...strategy import collectives


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


def add_rollout_metrics(metrics: MetricsAccumulator, experiences: Sequence[Experience], draws: bool = False) -> None:
    """Rewards, tokens, and every rollout metric of the registry, of this rank's micro-batches (B, A).

    draws: the model's responses may be images; some metrics are then also of each kind.
    """
    for each in experiences:
        metrics.add_moments("reward", each.info["reward"][each.valid.bool()])
        if draws:
            _add_kinds(metrics, each)
        metrics.add_total("tokens", each.info["total_length"].sum())
        for entry in registry.rollout_metrics:
            values = entry.load()(each)
            if values is not None:
                metrics.add_mean(entry.name, *(values if isinstance(values, tuple) else (values,)))
        for name, values in each.info["reward_metrics"].items():
            metrics.add_mean(f"reward/{name}", values, ~values.isnan())
    _add_groups(metrics, experiences)


def _add_kinds(metrics: MetricsAccumulator, experience: Experience) -> None:
    """The reward, and the entropy where it is known, of answers and of images apart."""
    drawn = experience.info["drawn"].bool()
    for kind, own in (("answer", ~drawn), ("drawing", drawn)):
        if own.any():
            metrics.add_moments(f"reward_{kind}", experience.info["reward"][experience.valid.bool() & own])
            if experience.action_entropy is not None:
                mask = experience.action_mask & own.unsqueeze(1)
                metrics.add_mean(f"entropy_{kind}", experience.action_entropy, mask)


def add_text_metrics(metrics: MetricsAccumulator, rollouts: Sequence[Rollout]) -> None:
    """See `text_statistics`; of this rank's answers, where it has any, averaged over ranks. Images are no texts."""
    answers = [each for each in rollouts if not each.prompt.draws]
    if not answers:
        return
    found = text_statistics([each.token_ids for each in answers], [each.prompt.group_id for each in answers])
    for name, value in found.items():
        metrics.add(name, value)


def add_image_metrics(metrics: MetricsAccumulator, rollouts: Sequence[Rollout]) -> None:
    """See `image_statistics`; of all ranks' drawings, where there are any. A collective.

    The variety within groups is `drawing_diversity`, of which no band is learnt: a model that comes to draw what its
    captions say draws one thing for one caption.
    """
    drawn = [each for each in rollouts if each.prompt.draws]
    images = [torch.from_numpy(np.array(each.image.convert("RGB"))).permute(2, 0, 1) / 255 for each in drawn]
    media = torch.stack(images) if images else torch.zeros(0, 3, SIDE, SIDE)
    thumbs, groups = gathered(
        media, torch.tensor([each.prompt.group_id for each in drawn]), collectives.all_gather_object
    )
    for name, value in (image_statistics(thumbs, groups) if len(thumbs) else {}).items():
        metrics.add("drawing_diversity" if name == "image_diversity" else name, value)


def add_distorted(metrics: MetricsAccumulator, rollouts: Sequence[Rollout], strength: int) -> None:
    """`reward_distorted`: of responses that were drawn from noisy images; `noise_strength`: of that noise."""
    metrics.add("noise_strength", float(strength))
    rewards = [each.reward for each in rollouts if each.distorted and each.valid]
    metrics.add_moments("reward_distorted", torch.tensor(rewards))


def gold_scores(gold: RewardComputationEngine, rollouts: Sequence[Rollout]) -> list[tuple[float, bool]]:
    """(score, whether it counts) of each rollout, which is only read. A collective."""
    scored = gold.score_rollouts(rollouts, len(rollouts))
    return list(zip(scored.score.tolist(), scored.valid.tolist()))


def add_gold(
    metrics: MetricsAccumulator, gold: RewardComputationEngine, rollouts: Sequence[Rollout], step: int
) -> Look:
    """`gold`: the mean over the rollouts that could be scored; returns it by group. A collective."""
    scores = gold_scores(gold, rollouts)
    for score, valid in scores:
        if valid:
            metrics.add("gold", score)
    return look_at(step, rollouts, scores)


def look_at(step: int, rollouts: Sequence[Rollout], scores: Sequence[tuple[float, bool]]) -> Look:
    """Reward and gold, as `gold_scores`, of each prompt of all ranks' rollouts. A collective."""
    mine = [
        (each.prompt.group_id, each.reward, score)
        for each, (score, valid) in zip(rollouts, scores)
        if valid and each.valid
    ]
    return look_of(step, (sample for part in collectives.all_gather_object(mine) for sample in part))


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
