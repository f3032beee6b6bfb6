"""The fixed evaluation of diffusion runs: held-out prompts and noise, an ODE; the same on any rank count."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...data.drawing_prompts import DrawPrompts
from ...data.validation import measured_labels, validation_shard_indices
from ...observe.guard.divergence import (
    PairedScores,
    coverage,
    diversity,
    drift,
    groups_of,
    paired_scores_of,
    thumbnails,
)
from ...observe.images import SHEET_IMAGES
from ...observe.recorder import gather_all, records_from_media
from ...rewards.batch import RewardOutput
from ...rewards.engine import RewardComputationEngine
from ...runtime import collectives
from ..loop import Evaluated
from .maker import score_samples
from .stages import DiffusionSampling, drawing_batch

T = torch.Tensor


@dataclass
class DrawingGold:
    """rewards: scores an image (or text) against its prompt. Of images whose kinds can be told apart also:

    kinds: uint8 thumbnails (N, 3, S, S) to what each shows (N). references: prompts (N) to thumbnails (N, 3, S, S) of
    one right image each, in fixed order.
    """

    rewards: RewardComputationEngine
    kinds: Callable[[T], T] | None = None
    references: Callable[[Sequence[str]], T] | None = None

    def of_set(self, thumbs: T, prompts: Sequence[str]) -> dict[str, float]:
        """`eval_diversity` and, with references, `eval_coverage` of thumbnails (N, 3, S, S); images of one prompt are a
        group. A prompt that stands once has no pairs: `eval_diversity` is left out where all do."""
        groups = groups_of(prompts)
        varied = diversity(thumbs, groups, self.kinds(thumbs) if self.kinds is not None else None)
        found = {"eval_diversity": varied} if varied == varied else {}
        if self.references is not None:
            found["eval_coverage"] = coverage(thumbs, groups, self.references(prompts), groups)
        return found


def paired_scores_at(step: int, prompts: T, reward: tuple[T, T], gold: RewardOutput) -> PairedScores:
    """Reward (scores and which of them are valid) and gold of each of all ranks' prompts; samples (B) of one number in
    `prompts` are taken together. A collective."""
    scores, valid = reward
    usable = valid.bool().cpu() & gold.valid.bool().cpu()
    mine = list(zip(*(each.cpu()[usable].tolist() for each in (prompts, scores, gold.score))))
    return paired_scores_of(step, (sample for part in collectives.all_gather_object(mine) for sample in part))


@dataclass
class DiffusionEvaluation:
    """Draws the held-out prompts with the present weights and scores them.

    records_to_keep: of so many first prompts records are made; trajectories: of them are stored as rollouts. gold: a
    judgement that training never sees, where there is one. base: thumbnails (N, 3, S, S) of what the weights before
    training drew.
    """

    sampling: DiffusionSampling
    prompts: DrawPrompts
    rewards: RewardComputationEngine
    records_to_keep: int
    trajectories: int
    gold: DrawingGold | None = None
    base: T | None = None
    labels: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = sorted(measured_labels([each.label for each in self.prompts.rows]))

    def run(self, step: int) -> Evaluated:
        """`eval_reward`, for each of `labels` `eval_reward_<label>`, and `eval_reward_label_mean`, in which all
        labels count alike; `validation/reward/<component>`; `eval_invalid_share` where some have no reward; with gold
        `eval_gold`, `eval_diversity`, `eval_coverage`; `eval_image_diversity` where prompts stand several times;
        `eval_drift`, the distance from the base's images of the same noise, which step 0 draws; records of the first
        prompts, in their order. A collective."""
        prompts = self.prompts
        shard = validation_shard_indices(len(prompts), rank=collectives.rank(), world_size=collectives.world_size())
        indices = [index for index, _ in shard]
        requests = drawing_batch([prompts[i] for i in indices], indices, first=0)
        requests.sample_ids = torch.tensor(indices)
        media = torch.cat([each.media for each in self.sampling.draw(requests, 0, purpose="eval")]).cpu()
        scored = score_samples(self.rewards, requests, media)
        values = {"eval_reward": scored.score, **{f"validation/reward/{k}": v for k, v in scored.components.items()}}
        values["eval_invalid_share"] = (~scored.valid.bool()).float()
        own_labels = [prompts[i].label for i in indices]
        for label in self.labels:
            other = torch.tensor([each != label for each in own_labels])
            values[f"eval_reward_{label}"] = scored.score.cpu().masked_fill(other, float("nan"))
        shown, paired_scores = dict(scored.components), None
        if self.gold is not None:
            golden = score_samples(self.gold.rewards, requests, media)
            values["eval_gold"] = shown["gold"] = golden.score
            paired_scores = paired_scores_at(step, requests.sample_ids, (scored.score, scored.valid), golden)
        real = torch.tensor([is_real for _, is_real in shard])
        records = records_from_media(
            requests.prompts, list(media), scored.score, shown, valid=scored.valid, group_ids=requests.group_ids
        )
        for record, index in zip(records, indices):
            record["sample_id"] = index
        metrics = _means_over_ranks(values, requests.sample_ids, real)
        if not metrics["eval_invalid_share"]:
            del metrics["eval_invalid_share"]
        labels = {each.label for each in prompts.rows} - {None}
        if len(labels) > 1:
            metrics["eval_reward_label_mean"] = _label_mean(sorted(labels), own_labels, scored.score, real)
        metrics |= self._of_set(media, requests.sample_ids, real, as_base=step == 0)
        own = [record for record, (index, is_real) in zip(records, shard) if is_real and index < self.records_to_keep]
        kept = gather_all(own)
        return Evaluated(metrics, kept[: self.trajectories], kept[:SHEET_IMAGES], paired_scores)

    def _of_set(self, media: T, ids: T, real: T, as_base: bool) -> dict[str, float]:
        """What the images of all ranks show together."""
        mine = [(int(i), each) for i, each, r in zip(ids, thumbnails(media).numpy(), real) if bool(r)]
        everything = sorted(
            (pair for part in collectives.all_gather_object(mine) for pair in part), key=lambda pair: pair[0]
        )
        thumbs = torch.stack([torch.from_numpy(each) for _, each in everything])
        prompts = [self.prompts[index].prompt for index, _ in everything]
        found = self.gold.of_set(thumbs, prompts) if self.gold is not None else {}
        varied = diversity(thumbs, groups_of(prompts))
        if varied == varied:
            found["eval_image_diversity"] = varied
        if as_base:
            self.base = thumbs
        elif self.base is not None and self.base.shape == thumbs.shape:
            found["eval_drift"] = drift(thumbs, self.base)
        return found


def _label_mean(labels: list[str], own: list[str | None], scores: T, real: T) -> float:
    """The mean over all labels of each one's mean score; own: of this rank's samples. A collective."""
    mine = [(label, value) for label, value, r in zip(own, scores.tolist(), real) if bool(r) and math.isfinite(value)]
    by_label: dict[str | None, list[float]] = defaultdict(list)
    for label, value in (each for part in collectives.all_gather_object(mine) for each in part):
        by_label[label].append(value)
    means = [math.fsum(by_label[each]) / len(by_label[each]) if by_label[each] else math.nan for each in labels]
    return math.fsum(means) / len(means)


def _means_over_ranks(values: dict[str, T], ids: T, real: T) -> dict[str, float]:
    """Means of this and all ranks' real, finite values, each summed in the order of the prompts. One collective: by a
    recipe with labels, ranks may have scored other components."""
    mine = {
        name: [(int(i), float(v)) for i, v, r in zip(ids, each, real) if bool(r) and bool(torch.isfinite(v))]
        for name, each in values.items()
    }
    ranks = collectives.all_gather_object(mine)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in ranks for name in part):
        entries = sorted(entry for part in ranks for entry in part.get(name, ()))
        found[name] = sum(value for _, value in entries) / len(entries) if entries else float("nan")
    return found
