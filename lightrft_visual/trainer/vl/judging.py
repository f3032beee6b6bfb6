"""What is watched beside the reward in vision-language runs: statistics of texts and drawings, and gold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...experience.rollouts import Rollout
from ...observe.guard.divergence import PairedScores, paired_scores_of
from ...observe.guard.images import SIDE, gathered, image_statistics
from ...observe.guard.texts import text_statistics
from ...observe.metrics import MetricsAccumulator
from ...rewards.engine import RewardComputationEngine
from ...runtime import collectives
from ..hooks import StepData

Scores = list[tuple[float, bool]]


@dataclass
class VLWatched:
    """For `features.guard`. gold: the judge, if there is one; draws: whether responses may be images."""

    gold: RewardComputationEngine | None
    draws: bool = False

    def add_statistics(self, step: StepData) -> None:
        """Of texts and, where there are any, of drawings. A collective."""
        add_text_metrics(step.metrics, step.rollouts)
        if self.draws:
            add_image_metrics(step.metrics, step.rollouts)

    def gold_of(self, rollouts: Sequence[Rollout]) -> Scores:
        """See `gold_scores`."""
        assert self.gold is not None
        return gold_scores(self.gold, rollouts)

    def add_gold(self, step: StepData, scores: Scores, number: int) -> PairedScores:
        """`gold`: the mean over the rollouts that could be scored. A collective."""
        for score, valid in scores:
            if valid:
                step.metrics.add("gold", score)
        return paired_scores_at(number, step.rollouts, scores)

    def close(self) -> None:
        """Release the judge's workers."""
        if self.gold is not None:
            self.gold.close()


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


def gold_scores(gold: RewardComputationEngine, rollouts: Sequence[Rollout]) -> list[tuple[float, bool]]:
    """(score, whether it counts) of each rollout, which is only read. A collective."""
    scored = gold.score_rollouts(rollouts, len(rollouts))
    return list(zip(scored.score.tolist(), scored.valid.tolist()))


def paired_scores_at(step: int, rollouts: Sequence[Rollout], scores: Sequence[tuple[float, bool]]) -> PairedScores:
    """Reward and gold, as `gold_scores`, of each prompt of all ranks' rollouts. A collective."""
    mine = [
        (each.prompt.group_id, each.reward, score)
        for each, (score, valid) in zip(rollouts, scores)
        if valid and each.valid
    ]
    return paired_scores_of(step, (sample for part in collectives.all_gather_object(mine) for sample in part))
