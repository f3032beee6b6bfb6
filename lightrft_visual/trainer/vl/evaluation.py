"""The fixed evaluation of vision-language runs: held-out prompts, sampled and greedy, the same on any rank count."""

import logging
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress

from ...data.validation import EvaluationRows, Fetched, measured_labels, validation_shard_indices
from ...errors import RolloutError, told_of
from ...experience.rollouts import Episode, PromptBatch, Rollout, SamplingSettings, release_media, release_vision
from ...observe.guard.divergence import PairedScores, paired_scores_of
from ...observe.images import SHEET_IMAGES
from ...observe.metrics import means_over_ranks
from ...observe.recorder import gather_all, gather_records, records_from_rollouts, select
from ...rewards.batch import InvalidTally
from ...rewards.engine import RewardComputationEngine
from ...runtime import collectives
from ...runtime.host_memory import give_back_freed_memory
from ..loop import Evaluated
from .maker import ExperienceMaker

log = logging.getLogger(__name__)
Scores = list[tuple[float, bool]]  # of each rollout what gold says, and whether it counts
TOTALS = ("eval_reward", "eval_reward_greedy")
LARGER = 8  # times as many prompts at once, where they have no media or their scoring makes the engine sleep
KINDS = {True: "drawing", False: "answer"}  # by whether a prompt asks for an image


@told_of("gold")
def gold_scores(
    gold: RewardComputationEngine, rollouts: Sequence[Rollout], chunk: int, tally: InvalidTally | None = None
) -> Scores:
    """(score, whether it counts) of each rollout, which is only read; failed episodes do not. A collective.

    Args:
        gold: which scores.
        rollouts: of this rank.
        chunk: samples a remote request.
        tally: as of `RewardComputationEngine.score`.
    """
    scored = gold.score_rollouts(rollouts, chunk, tally=tally)
    failed = [each.episode is not None and each.episode.failed for each in rollouts]
    return [(score, ok and not lost) for score, ok, lost in zip(scored.score.tolist(), scored.valid.tolist(), failed)]


def paired_scores_at(step: int, rollouts: Sequence[Rollout], scores: Sequence[tuple[float, bool]]) -> PairedScores:
    """Reward and gold of each prompt of all ranks' rollouts. A collective.

    Args:
        step: of the run.
        rollouts: of this rank, which are scored.
        scores: their gold and whether it is valid, as from `gold_scores`.
    """
    mine = [
        (each.prompt.group_id, each.reward, score)
        for each, (score, valid) in zip(rollouts, scores)
        if valid and each.valid
    ]
    return paired_scores_of(step, mine)


@dataclass
class Evaluation:
    """Scores the held-out prompts with the maker's engine and rewards.

    sampling: at the training temperature, several responses a prompt; the greedy pass takes one. Seeds depend on the
    prompt's number alone, so every evaluation draws alike; they come from `seed`, by default that of the run. samples:
    of the prompts, for media that are fetched now. prompts_at_once: of all ranks, whose media are held together, see
    `_part_size`; None: all.
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
    prompts_at_once: int | None = None
    labels: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = measured_labels(self.prompts.labels)
        self.draws = any(caption is not None for caption in self.prompts.captions)

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
        sampled, scores, values = self._in_parts(batch, real)
        paired_scores = None
        if self.gold is not None:
            for rollout, (score, valid) in zip(sampled, scores):
                if valid:
                    rollout.components["gold"] = score  # to be shown
                    values.append((rollout.sample_id, by_kind("eval_gold", rollout, score, self.draws)))
            paired_scores = paired_scores_at(step, sampled, scores)
        metrics = dict(sorted(means_over_ranks(values).items(), key=lambda item: (item[0] not in TOTALS, item[0])))
        if not metrics.get("eval_invalid_share"):
            metrics.pop("eval_invalid_share", None)
        else:  # and why this rank's episodes have none
            told = "%.0f%% of the evaluated responses have no usable reward and are left out%s"
            why = _reasons_of([each.episode for each in sampled if not each.valid and each.episode is not None])
            log.warning(told, 100 * metrics["eval_invalid_share"], why)
        if self.samples is not None and self.samples.remote:
            metrics["eval_bad_rows"] = float(fetched.lost)
        own = select(records_from_rollouts(sampled), self.records_to_keep, self.run_seed, step)
        chosen = {record["sample_id"] for record in own}
        shown, drawn = [each for each in sampled if each.sample_id in chosen], first_drawings(sampled)
        self._load_again([*shown, *drawn], batch)
        records = gather_records(records_from_rollouts(shown), self.records_to_keep, self.run_seed, step)
        sheet = gather_all(records_from_rollouts(drawn))[:SHEET_IMAGES]
        return Evaluated(metrics, records, sheet, paired_scores)

    def _in_parts(
        self, batch: PromptBatch, real: list[bool]
    ) -> tuple[list[Rollout], Scores, list[tuple[int, dict[str, float]]]]:
        """The sampled rollouts, without their tokens, nor media but those of episodes; what gold says of each, and what
        the means of both passes are made of. All ranks have as many parts; the share of invalid rewards is of a pass. A
        collective."""
        sampled: list[Rollout] = []
        scores: Scores = []
        values: list[tuple[int, dict[str, float]]] = []
        size, every = self._part_size(len(batch)), len(batch) * collectives.world_size()
        drawn, likeliest, golden = (
            InvalidTally(every * each.n) for each in (self.sampling, self.greedy, self.sampling)
        )
        for first in range(0, len(batch), size):
            at = range(len(batch))[first : first + size]
            part, kept = batch.select(at), [real[index] for index in at]
            with self.maker.settings.timer.phase("generate"):
                part.prepared = self.maker.rollout_stage.data_processor.features(part)  # once for both passes
            own, golds = self._rollouts(part, kept, self.sampling, drawn, golden)
            greedy, _ = self._rollouts(part, kept, self.greedy, likeliest, None)
            values += [(each.sample_id, self._values(each)) for each in own]
            values += [(each.sample_id, self._named("eval_reward_greedy", each)) for each in greedy if each.valid]
            episodes = {each.sample_id for each in own if each.episode is not None}
            freed = release_vision(own) + release_media(own, episodes)  # observations cannot be loaded again
            release_tokens(own)
            sampled += own
            scores += golds
            del part, greedy
            give_back_freed_memory(freed)
        return sampled, scores, values

    def _part_size(self, count: int) -> int:
        """Prompts of this rank at once, of `count`. LARGER times as many where they have no media, and where a model
        scores on the engine's device: the engine sleeps for it, once a pass of each part."""
        if self.prompts_at_once is None:
            return max(1, count)
        media = any(self.prompts.images) or any(self.prompts.videos)
        judges = [each for each in (self.maker.rewards, self.gold) if each is not None]
        larger = LARGER if not media or any(each.uses_device for each in judges) else 1
        return max(1, larger * self.prompts_at_once // collectives.world_size())

    def _load_again(self, rollouts: list[Rollout], batch: PromptBatch) -> None:
        """Media of the prompts of these rollouts of `batch`, which people are shown; those of episodes are there."""
        lost = [each for each in rollouts if each.episode is None]
        shown = {each.prompt.group_id for each in lost}
        part = batch.select([at for at, number in enumerate(batch.ids.tolist()) if number in shown])
        loaded = zip(*self.maker.rollout_stage.data_processor.media(part), strict=True)
        media = dict(zip(part.ids.tolist(), loaded, strict=True))
        for each in lost:
            each.prompt.images, each.prompt.videos = media[each.prompt.group_id]

    def _values(self, rollout: Rollout) -> dict[str, float]:
        """What a sampled response adds to the means, by their names."""
        own = self._named("eval_reward", rollout) if rollout.valid else {}
        applied = {name: score for name, score in rollout.components.items() if math.isfinite(score)}
        own |= {f"validation/reward/{name}": score for name, score in applied.items()}
        return own | {"eval_invalid_share": float(not rollout.valid)}

    def _named(self, name: str, rollout: Rollout) -> dict[str, float]:
        return by_kind(name, rollout, rollout.reward, self.draws, self.labels)

    def _rollouts(
        self,
        batch: PromptBatch,
        real: list[bool],
        settings: SamplingSettings,
        tally: InvalidTally,
        golden: InvalidTally | None = None,
    ) -> tuple[list[Rollout], Scores]:
        """Scored responses to this rank's real prompts, and what gold says of each. The others are scored as well: a
        rank may have none but those. tally, golden: of the pass, of rewards and of gold, which is not asked
        without. A collective."""
        rollouts = self.maker.sample(batch, settings, "eval", self.seed)
        collectives.meet()  # as of steps: environments take times of their own
        self.maker.judge(rollouts, tally)
        gold = self.gold if golden else None
        if gold is not None and gold.uses_device:
            self.maker.sleep(keep_weights=True)
        size = self.maker.settings.micro_batch_size
        scores = gold_scores(gold, rollouts, size, golden) if gold is not None else []
        kept = [is_real for is_real in real for _ in range(settings.n)]
        return list(compress(rollouts, kept)), list(compress(scores, kept))


def release_tokens(rollouts: list[Rollout]) -> None:
    """Of scored rollouts that nothing is trained on only the number of tokens stays: an id and its log-prob take 68
    bytes."""
    for each in rollouts:
        each.prompt.token_ids, each.token_ids = [], [0] * len(each.token_ids)
        each.log_probs = each.versions = each.experts = None


def first_drawings(rollouts: list[Rollout]) -> list[Rollout]:
    """For the contact sheet the first one of each prompt, of the first prompts that ask for one: the same prompts in
    every evaluation."""
    first = {each.prompt.group_id: each for each in reversed(rollouts) if each.prompt.draws}
    return [first[group] for group in sorted(first)][:SHEET_IMAGES]


def by_kind(name: str, rollout: Rollout, score: float, draws: bool, labels: Collection[str] = ()) -> dict[str, float]:
    """A score under the names of its means: of all, of its kind and of its label.

    Args:
        name: of the mean over all.
        rollout: that has the score.
        score: a valid one.
        draws: whether the model also draws: answers and drawn images then have means of their own.
        labels: that have. One that is called as a kind is not reported beside it.
    """
    kinds = [KINDS[rollout.prompt.draws]] if draws else []
    own = [rollout.prompt.label] if rollout.prompt.label in labels else []
    groups = kinds + [label for label in own if not (draws and label in KINDS.values())]
    return {name: score} | {f"{name}_{group}": score for group in groups}


def say_failed(rollouts: Sequence[Rollout]) -> None:
    """How many of these episodes failed, and why. Raises RolloutError where none has an answer."""
    failed = [each.episode for each in rollouts if each.episode is not None and each.episode.failure is not None]
    if not failed:
        return
    told = f"{len(failed)} of {len(rollouts)} episodes failed, and their answers may be cut or empty"
    if len(failed) == len(rollouts) and not any(each.turns for each in failed):
        raise RolloutError(f"{told}{_reasons_of(failed)}")
    log.warning("%s%s", told, _reasons_of(failed))


def _reasons_of(episodes: Sequence[Episode]) -> str:
    failures = Counter(each.reason.partition("\n")[0] for each in episodes if each.reason is not None)
    return "".join(f"; {count} x {failure}" for failure, count in failures.most_common(3))
