"""What the guard reads of a step's drawn images: their statistics, and their gold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...observe.guard.divergence import PairedScores, paired_scores_of
from ...observe.guard.images import gathered, image_statistics
from ...observe.metrics import MetricsAccumulator
from ...observe.rollouts import Record, records_from_media
from ...rewards.batch import RewardOutput
from ...runtime import collectives
from ..hooks import StepData
from .gold import DrawingGold
from .maker import Drawn, score_samples
from .stages import DrawingBatch

T = torch.Tensor


@dataclass
class DrawingWatched:
    """For `features.guard`. gold: the judge, if there is one."""

    gold: DrawingGold | None

    def add_statistics(self, step: StepData) -> None:
        """Of the step's images; of pairs of a file there are none. A collective."""
        if isinstance(step.rollouts, Drawn):
            add_image_metrics(step.metrics, step.rollouts.requests, step.rollouts.media)

    def gold_of(self, drawn: Drawn) -> RewardOutput:
        """All its scores."""
        return score_samples(self.gold.rewards, drawn.requests, drawn.media)

    def add_gold(self, step: StepData, scores: RewardOutput, number: int) -> PairedScores:
        """`gold`: the mean over the samples that could be scored. A collective."""
        drawn = step.rollouts
        step.metrics.add_mean("gold", scores.score, scores.valid)
        return paired_scores_at(number, drawn.requests.group_ids, (drawn.scored.score, drawn.valid), scores)

    def close(self) -> None:
        """Release the judge's workers."""
        if self.gold is not None:
            self.gold.rewards.close()


def records_of_drawn(drawn: Drawn) -> list[Record]:
    """One record for each image or video of this rank, with its reward and components."""
    batch, scored = drawn.requests, drawn.scored
    records = records_from_media(
        batch.prompts, list(drawn.media), scored.score, scored.components, valid=drawn.valid, group_ids=batch.group_ids
    )
    for record, sample_id in zip(records, batch.sample_ids.tolist()):
        record["sample_id"] = sample_id
    return records


def add_image_metrics(metrics: MetricsAccumulator, requests: DrawingBatch, media: torch.Tensor) -> None:
    """See `image_statistics`; of all ranks' media (B, 3, …) in 0..1. A collective."""
    thumbs, groups = gathered(media, requests.group_ids, collectives.all_gather_object)
    for name, value in image_statistics(thumbs, groups).items():
        metrics.add(name, value)


def paired_scores_at(step: int, prompts: T, reward: tuple[T, T], gold: RewardOutput) -> PairedScores:
    """Reward (scores and which of them are valid) and gold of each of all ranks' prompts; samples (B) of one number in
    `prompts` are taken together. A collective."""
    scores, valid = reward
    usable = valid.bool().cpu() & gold.valid.bool().cpu()
    mine = list(zip(*(each.cpu()[usable].tolist() for each in (prompts, scores, gold.score))))
    return paired_scores_of(step, (sample for part in collectives.all_gather_object(mine) for sample in part))
