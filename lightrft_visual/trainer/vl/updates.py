"""Optimizer steps on the replay buffer: the actor's and, for PPO, the critic's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

from ...algorithms.covariance import ChoiceInputs
from ...algorithms.kl import of_shape
from ...algorithms.loss_terms import PartSettings, denominators_of_steps, forward_with, terms_of
from ...algorithms.policy_losses import (
    LossDenominators,
    LossInputs,
    LossOutputs,
    global_denominators,
    high_entropy_masks,
    policy_loss,
    value_loss,
)
from ...config import registry
from ...config.constraints import load_target
from ...config.vl import AlgorithmConfig, RunConfig
from ...errors import ConfigError
from ...experience.batch_plan import MicroBatch
from ...experience.buffer import NaiveReplayBuffer
from ...experience.fields import unpack_actions
from ...experience.rollouts import ScoringRule
from ...experience.types import Experience, ModelInputs
from ...models.vlm.actor import ActorOutput
from ...observe.metrics import MetricsAccumulator, check_given
from ...rollout.parity import RolloutCheck
from ...runtime import collectives
from ...runtime.host_copies import to_device
from ...runtime.train_engine import StepResult, TrainEngine

T = torch.Tensor

Scores = list[tuple[MicroBatch, T]]  # log-probs (B, A) of each micro-batch, on the accelerator


@dataclass
class LossPart:
    """One part of a train batch's loss: its tokens (B, A) of each micro-batch, and what their loss is divided by."""

    settings: PartSettings
    token_masks: list[T]
    denominators: LossDenominators


@dataclass
class TrainBatch:
    """The micro-batches of one optimizer step on this rank, with denominators over all ranks.

    token_masks: for each micro-batch the tokens (B, A) that count, policy_masks those whose policy term is kept.
    parts: those of the loss that have a token; at least one. chosen: the tokens that the policy loss treats otherwise.
    """

    micro_batches: list[MicroBatch]
    token_masks: list[T]
    policy_masks: list[T] | None
    denominators: LossDenominators
    parts: list[LossPart]
    chosen: list[T] | None = None

    def counted(self, part: LossPart, index: int) -> T:
        """(B, A) bool: a part's tokens of a micro-batch, without those that a hook took out of `token_masks`."""
        own = part.token_masks[index]
        return own & self.token_masks[index].to(own)


def parts_of_loss(config: AlgorithmConfig, max_tokens: int, image_tokens: int | None = None) -> list[PartSettings]:
    """One part; two where responses may be images: answers and drawings.

    Args:
        config: for weights and entropy bonuses.
        max_tokens: of an answer.
        image_tokens: of an image; None: no response is one.
    """
    if image_tokens is None:
        return [PartSettings("", 1.0, config.entropy_coef, max_tokens)]
    answers, drawings = config.entropy_coefs
    return [
        PartSettings("answer", config.answer_loss_weight, answers, max_tokens),
        PartSettings("drawing", config.drawing_loss_weight, drawings, image_tokens),
    ]


def plan_batches(
    buffer: NaiveReplayBuffer,
    steps: Sequence[list[MicroBatch]],
    config: AlgorithmConfig,
    parts: Sequence[PartSettings],
    seed: int = 0,
) -> list[TrainBatch]:
    """Masks and denominators of optimizer steps, which are counted together. A collective: every rank calls it.

    Args:
        buffer: with the samples.
        steps: micro-batches of each of them on this rank.
        config: for what is masked.
        parts: by the samples' `loss_part`; with one, all samples belong to it.
        seed: of the first step, the same on every rank; those of the others follow it.
    """
    items = [[[buffer.items[index] for index in each.indices] for each in step] for step in steps]
    masks = [[_counted(*each, config.mask_truncated) for each in zip(*step)] for step in zip(items, steps)]
    counted = masks if buffer.counts else [[torch.zeros_like(mask) for mask in step] for step in masks]
    wholes, planned = denominators_of_steps(counted, parts[0].max_tokens), []
    for number, (own, step, token_masks, whole) in enumerate(zip(items, steps, masks, wholes)):
        made = [LossPart(parts[0], token_masks, whole)]
        if len(parts) > 1:
            ids = [torch.tensor([[int(item.info["loss_part"])] for item in each]) for each in own]
            made = _loss_parts(parts, token_masks, ids, whole)
        policy_masks, ratio = None, config.high_entropy_token_ratio
        if ratio < 1:  # of each part, as images have the larger entropy throughout
            entropies = [pad_sequence([item.action_entropy for item in each], True) for each in own]
            found = [high_entropy_masks(entropies, part.token_masks, ratio) for part in made]
            policy_masks = [torch.stack(each).any(dim=0) for each in zip(*found)]
        chosen = _chosen_tokens(buffer, own, config, made, seed + number)
        planned.append(TrainBatch(step, token_masks, policy_masks, whole, made, chosen))
    return planned


def _chosen_tokens(
    buffer: NaiveReplayBuffer,
    items: list[list[Any]],
    config: AlgorithmConfig,
    parts: list[LossPart],
    seed: int,
) -> list[T] | None:
    """Those of micro-batches of items that the policy loss treats otherwise, of each part by itself; None where it
    treats all alike. A collective."""
    chooses = registry.policy_losses[config.policy_loss].chooses
    if chooses is None:
        return None
    choose = load_target(chooses) if isinstance(chooses, str) else chooses
    log_probs, advantages = (
        [pad_sequence([getattr(item, name) for item in each], True) for each in items]
        for name in ("action_log_probs", "advantages")
    )
    ids = [torch.tensor([-1 if item.sample_id is None else int(item.sample_id) for item in each]) for each in items]
    given = [ChoiceInputs(log_probs, advantages, part.token_masks, ids, seed, buffer.counts) for part in parts]
    found = []
    for each in given:
        made = choose(each, config)
        found.append([*made] if isinstance(made, Iterable) else [])
        if len(found[-1]) != len(items) or not all(isinstance(mask, T) for mask in found[-1]):
            told = f"`chooses` of policy_loss {config.policy_loss} gave a {type(made).__name__}"
            raise ConfigError(f"{told}; it must give a mask of each micro-batch's tokens")
    return [torch.stack(each).any(dim=0) for each in zip(*found)]


def _loss_parts(parts: Sequence[PartSettings], masks: list[T], ids: list[T], whole: LossDenominators) -> list[LossPart]:
    """Those with a token, or the first one alone, where all tokens are of one part. A collective."""
    own = [[mask & (each == number) for mask, each in zip(masks, ids)] for number in range(len(parts))]
    made = [LossPart(part, mine, global_denominators(mine, part.max_tokens)) for part, mine in zip(parts, own)]
    return [part for part in made if part.denominators.tokens == whole.tokens][:1] or made


def _counted(items: Sequence[Any], micro_batch: MicroBatch, mask_truncated: bool) -> T:
    """(B, A) bool: the tokens that the loss counts; none of an invalid, repeated or left out sample."""
    masks = []
    for item in items:
        valid = not micro_batch.filler and (item.valid is None or bool(item.valid))
        if mask_truncated:
            valid = valid and not bool(item.info["truncated"])
        mask = item.action_mask if item.action_mask is not None else torch.ones_like(item.action_log_probs)
        masks.append(mask.bool() & valid)
    return pad_sequence(masks, True)


def has_dropout(module: nn.Module) -> bool:
    """Whether a forward in training mode may give other log-probs than one in evaluation mode."""
    numbers = ((name, value) for each in module.modules() for name, value in vars(each).items())
    layers = (each for each in module.modules() if isinstance(each, nn.modules.dropout._DropoutNd))
    return any(each.p > 0 for each in layers) or any(
        isinstance(value, float) and value > 0
        for name, value in numbers
        if any(noise in name for noise in ("dropout", "drop_path", "jitter_noise"))
    )


@dataclass
class PolicyUpdate:
    """One actor step per train batch.

    Old log-probs are those of the rollouts' policy. Where the experience brings none, the first update of a rollout
    takes those of its own forward pass, which is that policy still, and `score` makes those of the other updates.
    """

    actor: TrainEngine
    config: AlgorithmConfig
    rule: ScoringRule
    seed: int = 42  # of the run
    behaviour: bool = False  # old log-probs are the engine's: of the policies that drew the tokens
    separate: bool = False  # those of the first update are of a forward pass of their own too

    @classmethod
    def from_config(cls, config: RunConfig, actor: TrainEngine, rule: ScoringRule) -> Self:
        """As a run's configuration says.

        Args:
            config: of the run.
            actor: which is trained.
            rule: temperature and banned tokens of the log-probs.
        """
        behaviour = config.asynchronous.behaviour(config.algorithm.corrects_rollouts)
        separate = config.train.separate_old_log_probs or has_dropout(actor.module)
        return cls(actor, config.algorithm, rule, config.train.seed, behaviour, separate)

    @torch.no_grad()
    def score(
        self, buffer: NaiveReplayBuffer, batches: Sequence[TrainBatch], check: RolloutCheck, version: int | None = None
    ) -> None:
        """Old log-probs of train batches into the buffer's samples, by the policy as it stands.

        Args:
            buffer: with the samples.
            batches: whose micro-batches are scored.
            check: what compares them with the engine's.
            version: of the policy; tokens of other versions are not compared. None: all are.
        """
        scored: Scores = []
        for micro_batch in (each for batch in batches for each in batch.micro_batches):
            experience = buffer.load(micro_batch)
            inputs = ModelInputs.of(experience, micro_batch.media)
            output = self.actor(inputs, self.rule, with_entropy=False)
            if not micro_batch.filler:
                scored.append((micro_batch, output.log_probs))
                _compare(check, experience, output.log_probs, version)
        buffer.fill("action_log_probs", scored)

    def step(
        self,
        buffer: NaiveReplayBuffer,
        batch: TrainBatch,
        kl_coef: float,
        metrics: MetricsAccumulator,
        first: bool,
        check: RolloutCheck | None = None,
        version: int | None = None,
    ) -> StepResult:
        """Losses of all micro-batches, then one guarded step.

        Args:
            buffer: with the samples.
            batch: of the step.
            kl_coef: weight of the KL in the loss.
            metrics: what those of the loss are added to.
            first: the first update of this rollout.
            check: settled before the step, of which nothing is left when it raises.
            version: of the policy; tokens of other ones are not compared.
        """
        scored: Scores = []
        heard = None
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            experience = buffer.load(micro_batch)
            output, extra = self._forward(experience, micro_batch.media)
            read = self.loss_inputs(experience, output, batch, index, extra, first)
            if first:
                metrics.add_max("ratio_max_dev_first", self._deviation_of_fresh(experience, read))
            found = []
            for part in batch.parts:
                own, coefficient = self.config, part.settings.entropy_coef
                if own.entropy_coef != coefficient:
                    own = own.changed(entropy_coef=coefficient)
                mask = to_device(batch.counted(part, index), read.action_mask.device)
                found.append(policy_loss(replace(read, action_mask=mask), own, part.denominators, kl_coef))
                if experience.action_entropy is not None:  # a rollout metric then
                    found[-1].metrics.pop("entropy", None)
            losses = _joined(batch.parts, found) if batch.parts[0].settings.name else found[0]
            if experience.action_log_probs is None and not micro_batch.filler:
                scored.append((micro_batch, output.log_probs.detach()))
                _compare(check, experience, output.log_probs.detach(), version)
            heard = self.actor.accumulate(losses.loss, last, check.sums if check is not None and last else None)
            _record(metrics, losses, last and not batch.denominators.empty, buffer.counts)
            del experience, output, extra, read, found, losses  # nothing of it beside the next on the accelerator
        if check is not None:
            check.settle(heard)
        result = self.actor.step()
        if scored:
            buffer.fill("action_log_probs", scored)
        return result

    def _forward(self, experience: Experience, media: frozenset[str] | None) -> tuple[ActorOutput, dict[str, T]]:
        """The actor's output, and what terms of the loss read beside it, by the same forward."""
        terms = terms_of(self.config)
        coefficients = self.config.entropy_coef, self.config.drawing_entropy_coef  # the latter None: the former
        needing = registry.policy_losses[self.config.policy_loss], *terms
        entropy = any(coefficients) or any(each.needs_entropy for each in needing)
        # Without a pass before, the entropy that is reported is this one's.
        call = partial(self.actor, rule=self.rule, with_entropy=entropy or experience.action_entropy is None)
        return forward_with(terms, call, ModelInputs.of(experience, media), self.seed)

    @torch.no_grad()
    def _deviation_of_fresh(self, experience: Experience, read: LossInputs) -> T:
        """Largest |ratio - 1| over the tokens that count, by stored log-probs, without samples of earlier steps."""
        stored = None if self.behaviour else per_action(experience, "action_log_probs")
        mask, replayed = read.action_mask, experience.info.get("replayed")
        if replayed is not None:
            mask = mask & ~replayed.bool().to(mask.device).unsqueeze(1)
        drift = read.log_probs.float() - (read.old_log_probs if stored is None else stored).float()
        deviations = torch.expm1(drift).abs().where(mask, 0.0)
        return deviations.max() if deviations.numel() else deviations.new_zeros(())

    def loss_inputs(
        self, experience, output, batch: TrainBatch, index: int, extra: Mapping[str, T], first: bool = False
    ) -> LossInputs:
        """What the loss reads of a micro-batch, all (B, A).

        Args:
            experience: the micro-batch, loaded.
            output: the actor's for it.
            batch: of the optimizer step, with its masks.
            index: of the micro-batch in it.
            extra: what loss terms brought from the forward.
            first: the first update of a rollout, whose ratios are 1 but for samples of earlier steps. Stored scores by
                other batch sizes round differently, in bf16 by more than GSPO's clip range.
        """
        device = output.log_probs.device
        policy_mask, chosen = (
            None if masks is None else to_device(masks[index], device) for masks in (batch.policy_masks, batch.chosen)
        )
        old, own = per_action(experience, "action_log_probs"), output.log_probs.detach()
        if old is None:
            old = own
        elif first and not (self.separate or self.behaviour):
            replayed = experience.info.get("replayed")
            old = own if replayed is None else torch.where(replayed.bool().to(device).unsqueeze(1), old, own)
        sampled = per_action(experience, "rollout_log_probs")
        if sampled is not None:  # of another prompt where an image was noisy: nothing to correct by
            sampled = torch.where(comparable(experience, torch.ones_like(sampled, dtype=torch.bool)), sampled, old)
        return LossInputs(
            log_probs=output.log_probs,
            old_log_probs=sampled if self.behaviour else old,
            advantages=per_action(experience, "advantages"),
            action_mask=to_device(batch.token_masks[index], device),
            rollout_log_probs=None if self.behaviour else sampled,  # what they differ by from the old ones is told
            entropy=output.entropy,
            ref_log_probs=per_action(experience, "base_action_log_probs"),
            policy_mask=policy_mask,
            chosen=chosen,
            rewards=None if (rewards := experience.info.get("reward")) is None else rewards.to(device),
            extra=extra,
        )


@dataclass
class ValueUpdate:
    """One critic step per train batch; its loss is of each part by itself, weighed as the policy's."""

    critic: TrainEngine
    config: AlgorithmConfig

    def step(self, buffer: NaiveReplayBuffer, batch: TrainBatch, metrics: MetricsAccumulator) -> StepResult:
        """Losses of all micro-batches, then one guarded step.

        Args:
            buffer: with the samples.
            batch: of the step.
            metrics: what those of the loss are added to.
        """
        last, clip, mode = len(batch.micro_batches) - 1, self.config.value_clip, self.config.loss_agg_mode
        for index, micro_batch in enumerate(batch.micro_batches):
            experience = buffer.load(micro_batch)
            values = self.critic(ModelInputs.of(experience, micro_batch.media))
            targets = per_action(experience, "values"), per_action(experience, "returns")
            masks = [(to_device(batch.counted(each, index), values.device), each.denominators) for each in batch.parts]
            found = [value_loss(values, *targets, mask, clip, counts, mode) for mask, counts in masks]
            losses = _joined(batch.parts, found, "critic_loss") if batch.parts[0].settings.name else found[0]
            self.critic.accumulate(losses.loss, index == last)
            _record(metrics, losses, index == last and not batch.denominators.empty, buffer.counts)
        return self.critic.step()


def _joined(parts: Sequence[LossPart], found: Sequence[LossOutputs], name_of_loss: str = "loss") -> LossOutputs:
    """The losses of the parts as one, their metrics by the parts' names, and beside them the mean over all tokens."""
    total = sum(part.denominators.tokens for part in parts)
    metrics: dict[str, T] = {}
    maxima: dict[str, T | float] = {}
    for part, losses in zip(parts, found):
        share = part.denominators.tokens / total
        for name, value in losses.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + share * value
            metrics[f"{name}_{part.settings.name}"] = value
        for name, value in losses.maxima.items():
            maxima[name] = torch.maximum(torch.as_tensor(maxima.get(name, value)), torch.as_tensor(value))
    loss = sum(part.settings.weight * losses.loss for part, losses in zip(parts, found))
    return LossOutputs(loss, metrics | {name_of_loss: loss.detach()}, maxima=maxima)


def _record(metrics: MetricsAccumulator, losses: LossOutputs, last: bool, counts: bool) -> None:
    """Shares of the ranks that count add up to the train batch's value; the mean over the step's updates with a token
    that counts is reported. last: it is the last share of such an update."""
    updates = 1.0 if last and collectives.rank() == 0 else 0.0
    for name, share in losses.metrics.items():
        metrics.add(name, share if counts else 0.0, updates)
    for name, value in losses.maxima.items():
        metrics.add_max(name, value)


def _compare(check: RolloutCheck | None, experience, log_probs: T, version: int | None) -> None:
    """The trainer's scores (B, A) of a batch beside the engine's."""
    if check is not None:
        mask = comparable(experience, ModelInputs.of(experience).action_mask, version)
        check.add(log_probs, per_action(experience, "rollout_log_probs"), mask, token_names(experience, mask.shape[1]))


def token_names(experience, width: int) -> Callable[[int], str] | None:
    """How errors call the tokens (B, width) of episodes, by their number; None without turns. Holds no tensor of it."""
    listed = (experience.info or {}).get("turn_ids")
    if listed is None or experience.sample_id is None:
        return None
    turns, ids = [own.tolist() for own in listed], experience.sample_id.tolist()

    def named(position: int) -> str:
        index, column = divmod(position, width)
        turn = turns[index][column] if column < len(turns[index]) else -1
        return f"sample {ids[index]}, turn {turn + 1}, token {column + 1}"

    return named


def per_action(experience, name: str) -> T | None:
    """A field of a batch as (B, A), whether the batch is padded or packed."""
    values = getattr(experience, name)
    if values is None or not experience.is_packed:
        return values
    return unpack_actions(values, experience.num_actions)


def comparable(experience, mask: T, version: int | None = None) -> T:
    """The mask without responses that the engine drew from other images than the trainer scores them with.

    Args:
        experience: of B samples.
        mask: (B, A) bool.
        version: of a policy: tokens that another one drew are left out too; None: they stay.
    """
    distorted, versions = experience.info.get("distorted"), per_action(experience, "token_versions")
    if distorted is not None:
        mask = mask & ~distorted.bool().to(mask.device).unsqueeze(1)
    return mask if versions is None or version is None else mask & (versions == version).to(mask.device)


def _of_info(name: str, experience: Experience, usable: bool = False) -> T | tuple[T, T] | None:
    """A number of each sample that an info holds; None where it does not. usable: of those with a usable reward."""
    values = experience.info.get(name)
    return (values, experience.valid.bool()) if usable and values is not None else values


def _of_actions(name: str, experience: Experience, less: str = "") -> tuple[T, T] | None:
    """A field of numbers of each token, less another one, with their mask; None where one is not there."""
    values, other = getattr(experience, name), getattr(experience, less) if less else 0.0
    return None if values is None or other is None else (values - other, experience.action_mask)


def _clipped_advantages(experience: Experience) -> tuple[T, T] | None:
    share, mask = experience.info.get("advantage_clip_frac"), experience.action_mask
    return None if share is None else (share.unsqueeze(1).expand(mask.shape), mask)  # of all tokens, as its mean is


_teacher_kl = partial(_of_actions, "action_log_probs", less="teacher_log_probs")
# name -> what it is, and its values of one micro-batch; a plugin's stand beside them in the registry.
for _name, _about, _read in (
    ("reward_invalid_share", "share of samples without a usable reward", lambda e: (~e.valid.bool()).float()),
    ("response_length", "tokens of a response", partial(_of_info, "response_length")),
    ("truncated_share", "share of responses cut at generate_max_len", partial(_of_info, "truncated")),
    ("kl", "KL to the reference, per token", partial(_of_actions, "kl")),
    ("entropy", "of the token distribution, nats", partial(_of_actions, "action_entropy")),
    ("teacher_kl", "KL(policy || teacher) per sampled token", _teacher_kl),
    ("advantage_abs", "size of the advantages", lambda e: (e.advantages.abs(), e.action_mask)),
    ("comparable", "share of samples in groups of two valid ones or more", partial(_of_info, "comparable")),
    ("shaped_reward", "reward after penalty, norm and clip", partial(_of_info, "shaped_reward", usable=True)),
    ("advantage_clip_frac", "share of tokens with an advantage beyond advantage_clip", _clipped_advantages),
    ("overlong_penalty", "for length", partial(_of_info, "overlong_penalty", usable=True)),
    ("reward_clipped", "share of rewards beyond reward_clip", partial(_of_info, "reward_clipped", usable=True)),
):
    registry.rollout_metrics.register(_name, _about)(_read)


def add_rollout_metrics(
    metrics: MetricsAccumulator, experiences: Sequence[Experience], parts: Sequence[str] = ("",)
) -> None:
    """Rewards, tokens, and every rollout metric of the registry.

    Args:
        metrics: what they are added to.
        experiences: micro-batches (B, A) of this rank, scored.
        parts: names of the parts of the loss; where there are several, some metrics are also of each.
    """
    check_given("a rollout metric", dict.fromkeys(registry.rollout_metrics.names()))
    for each in experiences:
        metrics.add_moments("reward", each.info["reward"][each.valid.bool()])
        if len(parts) > 1:
            _add_parts(metrics, each, parts)
        metrics.add_total("tokens", each.info["total_length"].sum())
        for entry, values_of in registry.rollout_metrics.present():
            values = values_of(each)
            if values is not None:
                found = values if isinstance(values, tuple) else (values,)
                shape = getattr(found[-1], "shape", None)
                metrics.add_mean(entry.name, *(of_shape(one, shape, f"the metric {entry.name}") for one in found))
        for name, values in each.info["reward_metrics"].items():
            metrics.add_mean(f"reward/{name}", values, ~values.isnan())
    rewards = torch.cat([each.info["reward"] for each in experiences])
    groups = torch.cat([each.group_id for each in experiences])
    valid = torch.cat([each.valid.bool() for each in experiences])
    for group in groups.unique():  # whose valid rewards are all equal: they teach nothing
        own = rewards[(groups == group) & valid]
        metrics.add("zero_std_ratio", float(len(own) < 2 or bool(own.max() == own.min())))


def _add_parts(metrics: MetricsAccumulator, experience: Experience, parts: Sequence[str]) -> None:
    """The reward, and the entropy where it is known, of each part by itself."""
    for number, name in enumerate(parts):
        own = experience.info["loss_part"] == number
        if own.any():
            metrics.add_moments(f"reward_{name}", experience.info["reward"][experience.valid.bool() & own])
            if experience.action_entropy is not None:
                mask = experience.action_mask & own.unsqueeze(1)
                metrics.add_mean(f"entropy_{name}", experience.action_entropy, mask)


def kl_per_token(experiences: Sequence[Experience]) -> tuple[float, int]:
    """(mean KL to the reference over all response tokens, number of samples) of all ranks. A collective."""
    parts = [torch.stack([each.kl.double().sum(), each.action_mask.double().sum()]) for each in experiences]
    samples = torch.tensor([float(sum(len(each.kl) for each in experiences))], dtype=torch.float64)
    total, tokens, count = collectives.all_reduce_sum(torch.cat([torch.stack(parts).sum(dim=0), samples])).tolist()
    return total / max(tokens, 1.0), int(count)
