"""The fixed evaluation of diffusion runs: held-out prompts and noise, an ODE; the same on any rank count."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...data.drawing_prompts import DrawPrompts
from ...data.validation import validation_shard_indices
from ...observe.rollouts import gather_all, records_from_media
from ...rewards.engine import RewardComputationEngine
from ...strategy import collectives
from ..loop import Evaluated
from .maker import score_samples
from .stages import DiffusionSampling, rows_of

T = torch.Tensor
SHEET_IMAGES = 48  # of the contact sheet


@dataclass
class DiffusionEvaluation:
    """Draws the held-out prompts with the present weights and scores them.

    records_to_keep: of so many first prompts records are returned. held_out: a further score that training never sees,
    where there is one.
    """

    sampling: DiffusionSampling
    prompts: DrawPrompts
    rewards: RewardComputationEngine
    records_to_keep: int
    held_out: RewardComputationEngine | None = None

    def run(self) -> Evaluated:
        """`eval_reward`, `validation/reward/<component>`, `eval_quality` of the held-out score; records of the
        first prompts, in their order. A collective."""
        prompts = self.prompts
        shard = validation_shard_indices(len(prompts), rank=collectives.rank(), world_size=collectives.world_size())
        indices = [index for index, _ in shard]
        rows = rows_of([prompts[i] for i in indices], indices, first=0)
        rows.sample_ids = torch.tensor(indices)
        media = torch.cat([each.media for each in self.sampling.draw(rows, 0, purpose="eval")]).cpu()
        scored = score_samples(self.rewards, rows, media)
        values = {"eval_reward": scored.score, **{f"validation/reward/{k}": v for k, v in scored.components.items()}}
        if self.held_out is not None:
            values["eval_quality"] = score_samples(self.held_out, rows, media).score
        real = torch.tensor([is_real for _, is_real in shard])
        records = records_from_media(
            rows.prompts, list(media), scored.score, scored.components, valid=scored.valid, group_ids=rows.group_ids
        )
        for record, index in zip(records, indices):
            record["sample_id"] = index
        metrics = {name: _mean_over_ranks(each, rows.sample_ids, real) for name, each in values.items()}
        kept = [record for record, (index, is_real) in zip(records, shard) if is_real and index < self.records_to_keep]
        return Evaluated(metrics, gather_all(kept))


def _mean_over_ranks(values: T, ids: T, real: T) -> float:
    """Mean of this and all ranks' real, finite values, summed in the order of the prompts."""
    mine = [(int(i), float(v)) for i, v, r in zip(ids, values, real) if bool(r) and bool(torch.isfinite(v))]
    rows = sorted(row for part in collectives.all_gather_object(mine) for row in part)
    return sum(value for _, value in rows) / len(rows) if rows else float("nan")
