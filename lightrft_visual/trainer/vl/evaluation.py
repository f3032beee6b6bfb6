"""The fixed evaluation of vision-language runs: held-out prompts, sampled and greedy, the same on any rank count."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...data.drawing_prompts import EvaluationRows, Fetched
from ...data.validation import measured_labels, validation_shard_indices
from ...experience.rollouts import PromptBatch, Rollout, SamplingSettings
from ...observe.guard.divergence import PairedScores, paired_scores_of
from ...observe.images import SHEET_IMAGES
from ...observe.recorder import Record, gather_all, gather_records, records_from_rollouts
from ...rewards.engine import RewardComputationEngine
from ...runtime import collectives
from ..loop import Evaluated
from .maker import ExperienceMaker

log = logging.getLogger(__name__)


def gold_scores(gold: RewardComputationEngine, rollouts: Sequence[Rollout]) -> list[tuple[float, bool]]:
    """(score, whether it counts) of each rollout, which is only read; failed episodes do not. A collective."""
    scored = gold.score_rollouts(rollouts, len(rollouts))
    failed = [each.episode is not None and each.episode.failed for each in rollouts]
    return [(score, ok and not lost) for score, ok, lost in zip(scored.score.tolist(), scored.valid.tolist(), failed)]


def paired_scores_at(step: int, rollouts: Sequence[Rollout], scores: Sequence[tuple[float, bool]]) -> PairedScores:
    """Reward and gold, as `gold_scores`, of each prompt of all ranks' rollouts. A collective."""
    mine = [
        (each.prompt.group_id, each.reward, score)
        for each, (score, valid) in zip(rollouts, scores)
        if valid and each.valid
    ]
    return paired_scores_of(step, (sample for part in collectives.all_gather_object(mine) for sample in part))


@dataclass
class Evaluation:
    """Scores the held-out prompts with the maker's engine and rewards.

    sampling: at the training temperature, several responses a prompt; the greedy pass takes one. Seeds depend on the
    prompt's number alone, so every evaluation draws alike; they come from `seed`, by default that of the run. samples:
    of the prompts, for media that are fetched now.
    """

    maker: ExperienceMaker
    prompts: PromptBatch
    sampling: SamplingSettings
    greedy: SamplingSettings
    records_to_keep: int
    run_seed: int
    samples: EvaluationRows | None = None
    seed: int | None = None
    gold: RewardComputationEngine | None = None
    labels: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = measured_labels(self.prompts.labels)

    def run(self, step: int) -> Evaluated:
        """`eval_reward`, `eval_reward_greedy`, and both for each of `labels`: `eval_reward_<label>`; of the sampled
        responses `validation/reward/<component>`, `eval_invalid_share` where some have no reward, and `eval_gold` where
        there is gold; `eval_bad_rows` where rows may have to be fetched; records of the first."""
        shard = validation_shard_indices(
            len(self.prompts), rank=collectives.rank(), world_size=collectives.world_size()
        )
        indices = [index for index, _ in shard]
        fetched = self.samples.fetch(indices, step) if self.samples else Fetched(indices, [False] * len(indices))
        batch = self.prompts.select(fetched.indices)
        for position, index in enumerate(fetched.indices):
            if index in fetched.rows:
                batch.images[position], batch.videos[position] = fetched.rows[index].images, fetched.rows[index].videos
        real = [is_real and not masked for (_, is_real), masked in zip(shard, fetched.masked)]
        sampled, greedy = (self._rollouts(batch, real, settings) for settings in (self.sampling, self.greedy))
        metrics = _means("eval_reward", sampled, self.labels) | _means("eval_reward_greedy", greedy, self.labels)
        metrics = dict(sorted(metrics.items(), key=lambda item: item[0] not in ("eval_reward", "eval_reward_greedy")))
        metrics |= _component_means(sampled) | _left_out(sampled)
        paired_scores = None
        if self.gold is not None:
            scores = self._golden(sampled, metrics)
            paired_scores = paired_scores_at(step, sampled, scores)
        if self.samples is not None and self.samples.remote:
            metrics["eval_bad_rows"] = float(fetched.lost)
        records = gather_records(records_from_rollouts(sampled), self.records_to_keep, self.run_seed, step)
        return Evaluated(metrics, records, self._sheet(sampled), paired_scores)

    def _sheet(self, rollouts: list[Rollout]) -> list[Record]:
        """The first drawing of each prompt, of the first prompts of all ranks that ask for one: the same prompts in
        every evaluation. A collective."""
        first = {each.prompt.group_id: each for each in reversed(rollouts) if each.prompt.draws}
        mine = [first[group] for group in sorted(first)][:SHEET_IMAGES]
        return gather_all(records_from_rollouts(mine))[:SHEET_IMAGES]

    def _golden(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[tuple[float, bool]]:
        """`eval_gold` of all ranks' rollouts, by kind as the rewards; they get it as a component to show. Returns
        `gold_scores`. A collective."""
        scores = gold_scores(self.gold, rollouts)
        for rollout, (score, valid) in zip(rollouts, scores):
            if valid:
                rollout.components["gold"] = score
        mine = [(r.sample_id, None, score, r.prompt.draws) for r, (score, valid) in zip(rollouts, scores) if valid]
        metrics |= means_of("eval_gold", mine, set())
        return scores

    def _rollouts(self, batch: PromptBatch, real: list[bool], settings: SamplingSettings) -> list[Rollout]:
        """Scored responses to this rank's prompts, of those that are real."""
        rollouts = self.maker.sample(batch, settings, "eval", self.seed)
        self.maker.judge(rollouts)
        kept = [is_real for is_real in real for _ in range(settings.n)]
        return [rollout for rollout, is_real in zip(rollouts, kept) if is_real]


def _means(name: str, rollouts: list[Rollout], labels: set[str]) -> dict[str, float]:
    """Means over the valid rewards of all ranks: all together, by label, and of answers and drawn images apart where
    any are drawn. Summed in the prompts' order."""
    mine = [(r.sample_id, r.prompt.label, r.reward, r.prompt.draws) for r in rollouts if r.valid]
    return means_of(name, mine, labels)


def _left_out(rollouts: list[Rollout]) -> dict[str, float]:
    """`eval_invalid_share`: of all ranks' rollouts without a usable reward, which no mean holds; {} without any.
    A collective; also says how many, and what environments failed by."""
    invalid = [each for each in rollouts if not each.valid]
    counts = torch.tensor([float(len(invalid)), float(len(rollouts))])
    lost, total = collectives.all_reduce_sum(counts).tolist()
    if not lost:
        return {}
    failures = Counter(str(each.episode.failure).partition("\n")[0] for each in invalid if each.episode is not None)
    why = "".join(f"; {count} x {failure}" for failure, count in failures.most_common(3) if failure != "None")
    log.warning("%d of %d evaluated responses have no usable reward and are left out%s", lost, total, why)
    return {"eval_invalid_share": lost / total}


def _component_means(rollouts: list[Rollout]) -> dict[str, float]:
    """`validation/reward/<component>`: means over all ranks' rollouts to which a component applies, summed in the
    prompts' order. One collective: by a recipe with labels, ranks may have scored other components."""
    mine = [(r.sample_id, r.components) for r in rollouts]
    everything = sorted((one for part in collectives.all_gather_object(mine) for one in part), key=lambda one: one[0])
    scores: dict[str, list[float]] = defaultdict(list)
    for name, score in (pair for _, components in everything for pair in components.items()):
        if math.isfinite(score):
            scores[name].append(score)
    return {f"validation/reward/{name}": sum(values) / len(values) for name, values in sorted(scores.items())}


def means_of(name: str, mine: list[tuple[int, str | None, float, bool]], labels: set[str]) -> dict[str, float]:
    """The same of (sample, label, score, whether an image was drawn). A label that is called as a kind is not reported
    beside it. A collective."""
    everything = sorted((one for part in collectives.all_gather_object(mine) for one in part), key=lambda one: one[0])
    rewards: dict[str, list[float]] = defaultdict(list)
    kinds = {True: "drawing", False: "answer"} if any(draws for *_, draws in everything) else {}
    for _, label, reward, draws in everything:
        rewards[name].append(reward)
        if kinds:
            rewards[f"{name}_{kinds[draws]}"].append(reward)
        if label in labels and label not in kinds.values():
            rewards[f"{name}_{label}"].append(reward)
    return {key: sum(values) / len(values) for key, values in rewards.items()}
