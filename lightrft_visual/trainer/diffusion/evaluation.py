"""The fixed evaluation of diffusion runs: held-out prompts and noise, an ODE; the same on any rank count."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...data.drawing_prompts import DrawPrompts
from ...data.media import pixel_hash
from ...data.validation import measured_labels, validation_shard_indices
from ...errors import told_of
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
from ...observe.metrics import gathered_in_order, means_over_ranks
from ...observe.recorder import gather_all, records_from_media
from ...rewards.batch import RewardOutput
from ...rewards.engine import RewardComputationEngine
from ...runtime import collectives
from ..loop import Evaluated
from .maker import score_samples
from .stages import DiffusionSampling, DrawingBatch, drawing_batch, joined_media

T = torch.Tensor
OF_LABEL = "of label "  # begins the names of means that are reported for some labels


@dataclass
class DrawingGold:
    """rewards: scores an image (or text) against its prompt. Of images whose kinds can be told apart also:

    kinds: uint8 thumbnails (N, 3, S, S) to what each shows (N). references: prompts (N) to thumbnails (N, 3, S, S) of
    one right image each, in fixed order.
    """

    rewards: RewardComputationEngine
    kinds: Callable[[T], T] | None = None
    references: Callable[[Sequence[str]], T] | None = None

    def of_set(self, thumbs: T, prompts: Sequence[str], groups: T) -> dict[str, float]:
        """`eval_diversity` and, with references, `eval_coverage`. Left out is what no group is large enough for: a
        prompt that stands once has no pairs.

        Args:
            thumbs: thumbnails (N, 3, S, S).
            prompts: (N).
            groups: (N), of what asks for the same.
        """
        varied = diversity(thumbs, groups, self.kinds(thumbs) if self.kinds is not None else None)
        found = {"eval_diversity": varied}
        if self.references is not None:
            found["eval_coverage"] = coverage(thumbs, groups, self.references(prompts), groups)
        return {name: value for name, value in found.items() if value == value}


def paired_scores_at(step: int, prompts: T, reward: tuple[T, T], gold: tuple[T, T]) -> PairedScores:
    """Reward and gold of each of all ranks' prompts. A collective.

    Args:
        step: of the run.
        prompts: (B) numbers of the samples' prompts; those of one number are taken together.
        reward: (B) scores, and which of them are valid.
        gold: likewise, of the same B samples.
    """
    usable = reward[1].bool().cpu() & gold[1].bool().cpu()
    mine = list(zip(*(each.cpu()[usable].tolist() for each in (prompts, reward[0], gold[0]))))
    return paired_scores_of(step, mine)


@dataclass
class DiffusionEvaluation:
    """Draws the held-out prompts with the present weights and scores them.

    records_to_keep: of the first prompts, which are stored as rollouts. gold: a judgement that training never sees,
    where there is one. base: thumbnails (N, 3, S, S) of what the weights before training drew, and `identity` then;
    None before.
    """

    sampling: DiffusionSampling
    prompts: DrawPrompts
    rewards: RewardComputationEngine
    records_to_keep: int
    gold: DrawingGold | None = None
    base: T | None = None
    base_identity: str | None = None
    labels: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = sorted(measured_labels([each.label for each in self.prompts.rows]))

    @cached_property
    def asked(self) -> list[str]:
        """What each prompt asks for: its text, and hashes of the images that it comes with."""
        return ["\0".join([str(row.prompt), *map(pixel_hash, row.images)]) for row in self.prompts]

    @property
    def identity(self) -> str:
        """A hash of what is drawn, whatever the weights are: prompts, noise, sizes and steps."""
        own, sampling = self.sampling.settings, self.sampling
        size = own.height, own.width, own.num_frames, own.guidance_scale, own.negative_prompt
        return hashlib.sha256(repr((self.asked, sampling.run_seed, sampling.sampler.config, size)).encode()).hexdigest()

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
        media = joined_media(self.sampling.draw(requests, 0, purpose="eval"))
        scored = score_samples(self.rewards, requests, media, step)
        shown, golden, paired_scores = dict(scored.components), None, None
        if self.gold is not None:
            with told_of("gold"):
                golden = score_samples(self.gold.rewards, requests, media, step)
            shown["gold"] = golden.score
            both = ((each.score, each.valid) for each in (scored, golden))
            paired_scores = paired_scores_at(step, requests.sample_ids, *both)
        real = torch.tensor([is_real for _, is_real in shard])
        records = records_from_media(
            requests.prompts, list(media), scored.score, shown, valid=scored.valid, group_ids=requests.group_ids,
            sample_ids=requests.sample_ids,
        )  # fmt: skip
        if media.dim() == 5 and (rate := self.sampling.model.family.frame_rate or self.sampling.model.family.plays_at):
            records = [record | {"fps": rate} for record in records]
        metrics = self._means(requests, scored, golden, real)
        metrics |= self._of_set(media, requests.sample_ids, real, as_base=step == 0)
        made = max(SHEET_IMAGES, self.records_to_keep)
        kept = gather_all([record for record, (index, is_real) in zip(records, shard) if is_real and index < made])
        return Evaluated(metrics, kept[: self.records_to_keep], kept[:SHEET_IMAGES], paired_scores)

    def _means(
        self, requests: DrawingBatch, scored: RewardOutput, golden: RewardOutput | None, real: T
    ) -> dict[str, float]:
        """Over the real samples of all ranks. A collective."""
        columns = {"eval_reward": scored.score, **{f"validation/reward/{k}": v for k, v in scored.components.items()}}
        columns["eval_invalid_share"] = (~scored.valid.bool()).float()
        columns |= {} if golden is None else {"eval_gold": golden.score}
        rows = zip(*(values.tolist() for values in columns.values()))
        values = [dict(zip(columns, row)) for row in rows]
        for own, label in zip(values, requests.labels):
            own |= {} if label is None else {f"{OF_LABEL}{label}": own["eval_reward"]}
        ids = requests.sample_ids.tolist()
        found = means_over_ranks([(id_, own) for id_, own, is_real in zip(ids, values, real.tolist()) if is_real])
        metrics = {name: mean for name, mean in found.items() if not name.startswith(OF_LABEL)}
        metrics = {k: mean for k, mean in metrics.items() if math.isfinite(mean) or not k.startswith("validation/")}
        if not metrics["eval_invalid_share"]:
            del metrics["eval_invalid_share"]
        metrics |= {f"eval_reward_{label}": found[f"{OF_LABEL}{label}"] for label in self.labels}
        by_label = [mean for name, mean in found.items() if name.startswith(OF_LABEL)]
        if len(by_label) > 1:
            metrics["eval_reward_label_mean"] = math.fsum(by_label) / len(by_label)
        return metrics

    def _of_set(self, media: T, ids: T, real: T, as_base: bool) -> dict[str, float]:
        """What the images of all ranks show together."""
        mine = [(int(i), each) for i, each, r in zip(ids, thumbnails(media).numpy(), real) if bool(r)]
        everything = gathered_in_order(mine)
        thumbs = torch.stack([torch.from_numpy(each) for _, each in everything])
        asked = [self.asked[index] for index, _ in everything]
        prompts, groups = [each.partition("\0")[0] for each in asked], groups_of(asked)
        found = self.gold.of_set(thumbs, prompts, groups) if self.gold is not None else {}
        varied = diversity(thumbs, groups)
        if varied == varied:
            found["eval_image_diversity"] = varied
        if as_base:
            self.base, self.base_identity = thumbs, self.identity
        elif self.base is not None and self.base_identity == self.identity and self.base.shape == thumbs.shape:
            found["eval_drift"] = drift(thumbs, self.base)
        return found
