"""The fixed evaluation of vision-language runs: held-out prompts, sampled and greedy, the same on any rank count."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...batches.prompts import PromptBatch
from ...batches.rollouts import Rollout
from ...batches.sampling import SamplingSettings
from ...data.validation import validation_shard_indices
from ...observe.rollouts import gather_records, records_from_rollouts
from ...strategy import collectives
from ..fast_exp_maker import FastExperienceMaker
from ..loop import Evaluated

logger = logging.getLogger(__name__)
MAX_LABELS = 24  # with metrics of their own


def measured_labels(labels: Sequence[str | None]) -> set[str]:
    """The labels of the held-out prompts that get metrics of their own: all, or where they are more than MAX_LABELS the
    most frequent ones, each of two prompts or more. A label that is different for every prompt tells nothing apart."""
    counts = Counter(label for label in labels if label is not None)
    if len(counts) <= MAX_LABELS:
        return set(counts)
    chosen = {label for label, count in counts.most_common(MAX_LABELS) if count > 1}
    if collectives.is_rank_0():
        logger.warning(
            "the evaluation data has %d labels; eval_reward_<label> is reported for the %d most frequent that several "
            "prompts have, eval_reward counts all",
            len(counts),
            len(chosen),
        )
    return chosen


@dataclass
class Evaluation:
    """Scores the held-out prompts with the maker's engine and rewards.

    sampling: at the training temperature, several responses a prompt; the greedy pass takes one. Seeds depend on the
    prompt's number alone, so every evaluation draws alike.
    """

    maker: FastExperienceMaker
    prompts: PromptBatch
    sampling: SamplingSettings
    greedy: SamplingSettings
    records_to_keep: int
    run_seed: int
    labels: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = measured_labels(self.prompts.labels)

    def run(self, step: int) -> Evaluated:
        """`eval_reward`, `eval_reward_greedy`, and both for each of `labels`: `eval_reward_<label>`; records of the
        first."""
        sampled, greedy = self._rollouts(self.sampling), self._rollouts(self.greedy)
        metrics = _means("eval_reward", sampled, self.labels) | _means("eval_reward_greedy", greedy, self.labels)
        metrics = dict(sorted(metrics.items(), key=lambda item: item[0] not in ("eval_reward", "eval_reward_greedy")))
        records = gather_records(records_from_rollouts(sampled), self.records_to_keep, self.run_seed, step)
        return Evaluated(metrics, records)

    def _rollouts(self, settings: SamplingSettings) -> list[Rollout]:
        """Scored responses to this rank's prompts."""
        shard = validation_shard_indices(
            len(self.prompts), rank=collectives.rank(), world_size=collectives.world_size()
        )
        batch = self.prompts.select([index for index, _ in shard])
        rollouts = self.maker.generate(batch, settings, purpose="eval")
        self.maker.score(rollouts)
        real = [is_real for _, is_real in shard for _ in range(settings.n)]
        return [rollout for rollout, is_real in zip(rollouts, real) if is_real]


def _means(name: str, rollouts: list[Rollout], labels: set[str]) -> dict[str, float]:
    """Means over the valid rewards of all ranks: all together and by label. Summed in the prompts' order."""
    mine = [(r.sample_id, r.prompt.label, r.reward) for r in rollouts if r.valid]
    everything = sorted((row for rows in collectives.all_gather_object(mine) for row in rows), key=lambda row: row[0])
    rewards: dict[str, list[float]] = defaultdict(list)
    for _, label, reward in everything:
        rewards[name].append(reward)
        if label in labels:
            rewards[f"{name}_{label}"].append(reward)
    return {key: sum(values) / len(values) for key, values in rewards.items()}
