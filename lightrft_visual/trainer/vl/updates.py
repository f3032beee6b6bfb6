"""Optimizer steps on the replay buffer: the actor's and, for PPO, the critic's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from ...algorithms.policy_losses import (
    LossDenominators,
    LossInputs,
    LossOutputs,
    global_denominators,
    high_entropy_masks,
    policy_loss,
    value_loss,
)
from ...batches.model_inputs import ModelInputs
from ...batches.sampling import ScoringRule
from ...config.vl import AlgorithmConfig
from ...models.vlm.actor import ActorOutput
from ...models.vlm.masked_images import beside_hidden, halves
from ...observe.metrics import MetricsAccumulator
from ...replay.buffer import NaiveReplayBuffer
from ...replay.items import unpack_actions
from ...replay.plan import MicroBatch
from ...rollout.parity import RolloutCheck
from ...strategy import collectives
from ...strategy.deepspeed import StepResult, TrainEngine

T = torch.Tensor


@dataclass
class KindShare:
    """The samples of one kind of response in a train batch: their tokens (B, A) of each micro-batch, what their loss
    is divided by, its weight, and that of its entropy. A loss of each kind by itself keeps the few tokens of answers
    from being lost among those of images."""

    name: str
    weight: float
    entropy_coef: float
    token_masks: list[T]
    denominators: LossDenominators


@dataclass
class TrainBatch:
    """The micro-batches of one optimizer step on this rank, with denominators over all ranks.

    token_masks: for each micro-batch the tokens (B, A) that count, policy_masks those whose policy term is kept.
    kinds: the parts of the policy loss where responses are of both kinds; else there is one, of everything.
    """

    micro_batches: list[MicroBatch]
    token_masks: list[T]
    policy_masks: list[T] | None
    denominators: LossDenominators
    kinds: list[KindShare]


def plan_batch(
    buffer: NaiveReplayBuffer,
    micro_batches: list[MicroBatch],
    config: AlgorithmConfig,
    max_tokens: int,
    image_tokens: int | None = None,
) -> TrainBatch:
    """Masks and denominators of one optimizer step. A collective: every rank calls it.

    max_tokens: the longest answer; image_tokens: tokens of an image, where responses may be images.
    """
    masks, drawn, entropies = [], [], []
    for micro_batch in micro_batches:
        items = [buffer[index] for index in micro_batch.indices]
        masks.append(_padded([_counted(item, micro_batch, config.mask_truncated) for item in items]))
        if image_tokens is not None:
            drawn.append(torch.tensor([[bool(item.info["drawn"])] for item in items]))
        if config.high_entropy_token_ratio < 1:
            entropies.append(_padded([item.action_entropy for item in items]))
    counted = masks if buffer.counts else [torch.zeros_like(mask) for mask in masks]
    whole = global_denominators(counted, max_tokens)
    kinds, policy_masks = [KindShare("", 1.0, config.entropy_coef, masks, whole)], None
    if image_tokens is not None:
        answers = [mask & ~images for mask, images in zip(masks, drawn)]
        images = [mask & images for mask, images in zip(masks, drawn)]
        weights, coefs = (config.answer_loss_weight, config.drawing_loss_weight), config.entropy_coefs
        both = [
            KindShare("answer", weights[0], coefs[0], answers, global_denominators(answers, max_tokens)),
            KindShare("drawing", weights[1], coefs[1], images, global_denominators(images, image_tokens)),
        ]
        alone = [kind for kind in both if kind.denominators.tokens == whole.tokens]  # the other one has no token
        kinds = alone[:1] or both
    if config.high_entropy_token_ratio < 1:  # of each kind, as images have the larger entropy throughout
        chosen = [high_entropy_masks(entropies, kind.token_masks, config.high_entropy_token_ratio) for kind in kinds]
        policy_masks = [torch.stack(parts).any(dim=0) for parts in zip(*chosen)]
    return TrainBatch(micro_batches, masks, policy_masks, whole, kinds)


def _counted(item, micro_batch: MicroBatch, mask_truncated: bool) -> T:
    """(a) bool: the tokens of one sample that the loss counts; none of an invalid, repeated or left out one."""
    valid = not micro_batch.filler and (item.valid is None or bool(item.valid))
    if mask_truncated:
        valid = valid and not bool(item.info["truncated"])
    mask = item.action_mask if item.action_mask is not None else torch.ones_like(item.action_log_probs)
    return mask.bool() & valid


def _padded(rows: list[T]) -> T:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def has_dropout(module: nn.Module) -> bool:
    """Whether a forward in training mode may give other log-probs than one in evaluation mode."""
    numbers = ((name, value) for each in module.modules() for name, value in vars(each).items())
    layers = (each for each in module.modules() if isinstance(each, nn.modules.dropout._DropoutNd))
    return any(each.p > 0 for each in layers) or any(
        isinstance(value, float) and value > 0 for name, value in numbers if "dropout" in name or "drop_path" in name
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
    seed: int = 42  # of what PAPO hides
    behaviour: bool = False  # old log-probs are the engine's: of the policies that drew the tokens
    version: int | None = None  # of the policy, where tokens may be older

    @torch.no_grad()
    def score(self, buffer: NaiveReplayBuffer, batches: Sequence[TrainBatch], check: RolloutCheck) -> None:
        """Old log-probs of train batches into the buffer's samples, by the policy as it stands."""
        for micro_batch in (each for batch in batches for each in batch.micro_batches):
            experience = buffer.load(micro_batch)
            inputs = ModelInputs.of(experience)
            output = self.actor(inputs, self.rule, with_entropy=False)
            self._keep(buffer, micro_batch, experience, output.log_probs, check)

    def step(
        self,
        buffer: NaiveReplayBuffer,
        batch: TrainBatch,
        kl_coef: float,
        metrics: MetricsAccumulator,
        first: bool,
        check: RolloutCheck | None = None,
    ) -> StepResult:
        """Losses of all micro-batches, then one guarded step.

        Args:
            first: the first update of this rollout.
            check: settled before the step, of which nothing is left when it raises.
        """
        last = len(batch.micro_batches) - 1
        for index in range(len(batch.micro_batches)):
            losses = self._accumulate(buffer, batch, index, kl_coef, check)
            _record(metrics, losses, index == last, buffer.counts, first)
        if check is not None:
            check.settle()
        return self.actor.step()

    def _accumulate(
        self, buffer: NaiveReplayBuffer, batch: TrainBatch, index: int, kl_coef: float, check: RolloutCheck | None
    ) -> LossOutputs:
        """Micro-batch number `index` forward and backward; nothing else of it is kept on the accelerator."""
        micro_batch = batch.micro_batches[index]
        experience = buffer.load(micro_batch)
        output, hidden = self._forward(ModelInputs.of(experience), experience.action_entropy is None)
        read = self.loss_inputs(experience, output, batch, index, hidden)
        losses = self._losses(read, batch, index, kl_coef)
        losses.maxima["ratio_max_dev_first"] = _deviation_of_fresh(read, experience.info.get("replayed"))
        self.actor.accumulate(losses.loss, index == len(batch.micro_batches) - 1)
        if experience.action_log_probs is None:
            self._keep(buffer, micro_batch, experience, output.log_probs.detach(), check)
        return replace(losses, loss=losses.loss.detach())

    def _losses(self, inputs: LossInputs, batch: TrainBatch, index: int, kl_coef: float) -> LossOutputs:
        """Of micro-batch number `index`: the sum of the kinds' losses, each a share of its own kind's in the batch."""
        parts = []
        for kind in batch.kinds:
            own = replace(inputs, action_mask=kind.token_masks[index].to(inputs.action_mask.device))
            config = replace(self.config, entropy_coef=kind.entropy_coef)
            parts.append(policy_loss(own, config, kind.denominators, kl_coef))
        return parts[0] if not batch.kinds[0].name else _joined(batch.kinds, parts)

    def _forward(self, inputs: ModelInputs, report_entropy: bool) -> tuple[ActorOutput, ActorOutput | None]:
        """The actor's output, and for PAPO its output with a part of the images hidden, by the same forward."""
        config = self.config
        # Without a pass before, the entropy that is reported is this one's.
        with_entropy = report_entropy or any(config.entropy_coefs) or config.papo_entropy_coef > 0
        if config.papo_coef == 0:
            return self.actor(inputs, self.rule, with_entropy=with_entropy), None
        both = beside_hidden(inputs, config.papo_mask_ratio, self.seed)
        return halves(self.actor(both, self.rule, with_entropy=with_entropy))

    def _keep(
        self, buffer: NaiveReplayBuffer, micro_batch: MicroBatch, experience, log_probs: T, check: RolloutCheck | None
    ) -> None:
        """The scores (B, A) as the samples' old log-probs, for the updates to come, and beside the engine's."""
        if micro_batch.filler:
            return
        buffer.fill(micro_batch, "action_log_probs", log_probs)
        if check is not None:
            mask = comparable(experience, ModelInputs.of(experience).action_mask, self.version)
            check.add(log_probs, per_action(experience, "rollout_log_probs"), mask)

    def loss_inputs(self, experience, output, batch: TrainBatch, index: int, hidden=None) -> LossInputs:
        """What the loss reads of micro-batch number `index` and the actor's outputs for it, all (B, A)."""
        device = output.log_probs.device
        policy_mask = batch.policy_masks[index].to(device) if batch.policy_masks is not None else None
        old = per_action(experience, "action_log_probs")
        old = output.log_probs.detach() if old is None else old
        sampled = per_action(experience, "rollout_log_probs")
        if sampled is not None:  # of another prompt where an image was noisy: nothing to correct by
            sampled = torch.where(comparable(experience, torch.ones_like(sampled, dtype=torch.bool)), sampled, old)
        return LossInputs(
            log_probs=output.log_probs,
            old_log_probs=sampled if self.behaviour else old,
            advantages=per_action(experience, "advantages"),
            action_mask=batch.token_masks[index].to(device),
            rollout_log_probs=None if self.behaviour else sampled,  # what they differ by from the old ones is told
            entropy=output.entropy,
            ref_log_probs=per_action(experience, "base_action_log_probs"),
            policy_mask=policy_mask,
            hidden_log_probs=None if hidden is None else hidden.log_probs,
            hidden_entropy=None if hidden is None else hidden.entropy,
        )


@dataclass
class ValueUpdate:
    """One critic step per train batch; its loss is of each kind of response by itself, weighed as the policy's."""

    critic: TrainEngine
    config: AlgorithmConfig

    def step(self, buffer: NaiveReplayBuffer, batch: TrainBatch, metrics: MetricsAccumulator) -> StepResult:
        """Losses of all micro-batches, then one guarded step."""
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            experience = buffer.load(micro_batch)
            values = self.critic(ModelInputs.of(experience))
            targets = per_action(experience, "values"), per_action(experience, "returns")
            masks = [(kind.token_masks[index].to(values.device), kind.denominators) for kind in batch.kinds]
            parts = [value_loss(values, *targets, mask, self.config.value_clip, counts) for mask, counts in masks]
            losses = parts[0] if not batch.kinds[0].name else _joined(batch.kinds, parts, "critic_loss")
            self.critic.accumulate(losses.loss, index == last)
            _record(metrics, losses, index == last, buffer.counts)
        return self.critic.step()


def _joined(kinds: Sequence[KindShare], parts: Sequence[LossOutputs], name_of_loss: str = "loss") -> LossOutputs:
    """The losses of the kinds as one, their metrics by the kinds' names, and beside them the mean over all tokens."""
    total = sum(kind.denominators.tokens for kind in kinds)
    metrics: dict[str, T] = {}
    maxima: dict[str, T | float] = {}
    for kind, part in zip(kinds, parts):
        share = kind.denominators.tokens / total
        for name, value in part.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + share * value
            metrics[f"{name}_{kind.name}"] = value
        for name, value in part.maxima.items():
            maxima[name] = torch.maximum(torch.as_tensor(maxima.get(name, value)), torch.as_tensor(value))
    loss = sum(kind.weight * part.loss for kind, part in zip(kinds, parts))
    return LossOutputs(loss, metrics | {name_of_loss: loss.detach()}, maxima=maxima)


def _record(metrics: MetricsAccumulator, losses: LossOutputs, last: bool, counts: bool, first: bool = False) -> None:
    """Shares of the ranks that count add up to the train batch's value; the mean over updates of the step is
    reported."""
    updates = 1.0 if last and collectives.is_rank_0() else 0.0
    for name, share in losses.metrics.items():
        metrics.add(name, share if counts else 0.0, updates)
    for name, value in losses.maxima.items():
        if first or name != "ratio_max_dev_first":
            metrics.add_max(name, value)


@torch.no_grad()
def _deviation_of_fresh(inputs: LossInputs, replayed: T | None) -> T:
    """Largest |ratio - 1| over the tokens that count, without those of samples (B) of earlier steps."""
    mask = inputs.action_mask
    if replayed is not None:
        mask = mask & ~replayed.bool().to(mask.device).unsqueeze(1)
    ratios = torch.exp(inputs.log_probs.float() - inputs.old_log_probs.float())
    deviations = torch.where(mask, (ratios - 1).abs(), torch.zeros((), device=mask.device))
    return deviations.max() if deviations.numel() else deviations.new_zeros(())


def per_action(experience, name: str) -> T | None:
    """A field of a batch as (B, A), whether the batch is padded or packed."""
    values = getattr(experience, name)
    if values is None or not experience.is_packed:
        return values
    return unpack_actions(values, experience.num_actions)


def comparable(experience, mask: T, version: int | None = None) -> T:
    """A mask (B, A) without the responses that the engine drew from other images than the trainer scores them with, and
    without tokens that another policy than `version` drew, where that is given."""
    distorted, versions = experience.info.get("distorted"), per_action(experience, "token_versions")
    if distorted is not None:
        mask = mask & ~distorted.bool().to(mask.device).unsqueeze(1)
    return mask if versions is None or version is None else mask & (versions == version).to(mask.device)
