"""What the guard reads of a step's drawn images: their statistics, and their gold."""

from __future__ import annotations

import torch

from ...guard.gains import Look, look_of
from ...guard.gold import DrawingGold
from ...guard.images import gathered, image_statistics
from ...observe.metrics import MetricsAccumulator
from ...rewards.batch import RewardOutput
from ...strategy import collectives
from .maker import score_samples
from .stages import DrawingBatch

T = torch.Tensor


def add_image_metrics(metrics: MetricsAccumulator, rows: DrawingBatch, media: torch.Tensor) -> None:
    """See `image_statistics`; of all ranks' media (B, 3, …) in 0..1. A collective."""
    thumbs, groups = gathered(media, rows.group_ids, collectives.all_gather_object)
    for name, value in image_statistics(thumbs, groups).items():
        metrics.add(name, value)


def add_gold(metrics: MetricsAccumulator, gold: DrawingGold, rows: DrawingBatch, media: torch.Tensor) -> RewardOutput:
    """`gold`: the mean over the samples that could be scored; returns all scores."""
    scored = score_samples(gold.rewards, rows, media)
    metrics.add_mean("gold", scored.score, scored.valid)
    return scored


def look_at(step: int, prompts: T, reward: tuple[T, T], gold: RewardOutput) -> Look:
    """Reward (scores and which of them are valid) and gold of each of all ranks' prompts; samples (B) of one number in
    `prompts` are taken together. A collective."""
    scores, valid = reward
    usable = valid.bool().cpu() & gold.valid.bool().cpu()
    mine = list(zip(*(each.cpu()[usable].tolist() for each in (prompts, scores, gold.score))))
    return look_of(step, (sample for part in collectives.all_gather_object(mine) for sample in part))
