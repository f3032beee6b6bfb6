"""Optimizer steps of diffusion runs: on replayed denoising steps, and by the gradient of a differentiable reward."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress

import torch
from torch.nn.functional import one_hot

from ...algorithms.diffusion import Loss
from ...algorithms.diffusion.context import LossContext
from ...algorithms.diffusion.denoising_batch import (
    batch_at,
    grouped_steps,
    noisy_steps,
    random_share,
    shuffled_steps,
    trainable_steps,
)
from ...algorithms.diffusion.preference import Forward, couplings
from ...algorithms.diffusion.reward_fl import DifferentiableScore
from ...algorithms.loss_terms import LossOutputs
from ...config.kinds import DiffusionAlgorithm
from ...errors import ConfigError
from ...experience.batch_plan import MicroBatch
from ...experience.buffer import NaiveReplayBuffer
from ...experience.types import ExperienceDiffusion
from ...observe.metrics import MetricsAccumulator, check_given
from ...rewards.batch import RewardOutput
from ...rewards.differentiable import check_finite
from ...rollout.diffusion_sampler import draw_noise, sample_generators
from ...runtime import collectives
from ...runtime.host_copies import HostCopies, to_device
from ...runtime.train_engine import StepResult, TrainEngine
from .maker import Drawn
from .stages import DiffusionSampling, DrawingBatch, Graphed

T = torch.Tensor
_NAMES = {"clip_fraction": "clip_frac"}


@dataclass
class ReplayUpdate:
    """One optimizer step over rows of (sample, denoising step), each sample in an order of steps of its own.

    fraction, choice: the share of the steps that is trained on, and which: 'first' or each sample's own 'random' ones.
    steps_per_forward: steps of each sample that one forward and backward take together; memory grows with it.
    min_sigma: least noise that losses on finished samples add. counts: see `_add_loss`.
    """

    engine: TrainEngine
    algorithm: DiffusionAlgorithm
    loss: Loss
    fraction: float
    choice: str
    steps_per_forward: int = 1
    min_sigma: float = 0.0
    counts: bool = True

    def step(
        self,
        batches: Sequence[ExperienceDiffusion],
        context: LossContext,
        seed: int,
        metrics: MetricsAccumulator,
        first: bool,
        samples: int,
    ) -> StepResult:
        """Losses of all micro-batches, then one guarded step. A collective.

        Nothing is read off the device before the step, where the batches come from the host, on which they are planned.

        Args:
            batches: the update's micro-batches of this rank, at least one.
            context: for the loss.
            seed: of the order of each sample's steps.
            metrics: what those of the loss are added to.
            first: the first update of this rollout.
            samples: valid ones of the update over all ranks, which the mean counts; see `plan_updates`.
        """
        forwards = self._plan(batches, context, seed)
        of_a_sample = sum(each.steps.shape[1] for each in forwards) // len(batches)  # steps, as many of each
        total = float(samples * of_a_sample)
        coupled = couplings(self.loss, context, forwards) if self.algorithm.coupled else [None] * len(forwards)
        for index, forward in enumerate(forwards):
            part, last = forward.batch(), index == len(forwards) - 1
            part.coupling = coupled[index]
            # The first and the last backward must reach all trained weights: DeepSpeed starts a buffer of gradients at
            # the first one (a weight without a gradient there keeps what the step before has left) and, with offload,
            # hands it on at the last one.
            everywhere = context.policy.trainable if last or index == 0 else ()
            with context.policy.running(forward.experts.union(everywhere)):
                outputs = self.loss.loss(context, part, total)
            _add_loss(metrics, outputs, part.valid.sum(), last, first, self.counts)
            if outputs.loss.requires_grad:  # else the steps of an expert that is not trained
                self.engine.accumulate(outputs.loss, last)
        return self.engine.step()

    def step_on_graphs(
        self, graphed: list[Graphed], context: LossContext, metrics: MetricsAccumulator, total: float
    ) -> StepResult:
        """The same on the rollout's own graphs, a backward for each of its micro-batches. A collective.

        Args:
            graphed: the micro-batches, of which none is left.
            context: for the loss.
            metrics: what those of the loss are added to.
            total: what the mean counts; see `worth_using`.
        """
        while graphed:
            experience, kept = graphed.pop(0)
            experience.to_device(kept.log_probs.device)
            part = batch_at(experience, torch.tensor(kept.steps).expand(len(experience.latents), -1))
            part.kept = kept
            outputs = self.loss.loss(context, part, total)
            _add_loss(metrics, outputs, part.valid.sum(), not graphed, first=True)
            self.engine.accumulate(outputs.loss, last=not graphed)
        return self.engine.step()

    def _plan(self, batches: Sequence[ExperienceDiffusion], context: LossContext, seed: int) -> list[Forward]:
        """The forwards of micro-batches; every sample has as many steps. All ranks make as many, of the same experts: a
        collective, where their samples' steps differ and there are several."""
        policy, planned, used = context.policy, [], []
        for experience in batches:
            steps = self._trained_steps(experience, seed)
            timesteps = experience.timesteps.gather(1, steps.to(experience.timesteps.device))
            experts = policy.family.expert_index(timesteps)
            planned.append(grouped_steps(steps, experts))
            used.append(one_hot(experts.sort(dim=1).values, len(policy.denoisers)).amax(dim=0))  # (n, experts)
        if self.choice == "random" and len(policy.denoisers) > 1:
            used = [*collectives.all_reduce_max(torch.stack(used))]
        once, names = cache(partial(to_device, device=policy.device)), tuple(policy.denoisers)  # shared: moved once
        forwards = []
        for experience, steps, marks in zip([_moved(each, once) for each in batches], planned, used):
            columns = [frozenset(compress(names, marked)) for marked in marks.tolist()]
            for each in step_slices(columns, self.steps_per_forward):
                forwards.append(Forward(experience, steps[:, each], columns[each.start]))
        return forwards

    def _trained_steps(self, experience: ExperienceDiffusion, seed: int) -> T:
        """(B, n): stochastic steps for losses on SDE steps, any step of the schedule for losses on data."""
        ids = experience.group_id if self.algorithm.coupled else experience.sample_id
        share = self.fraction if self.choice == "first" else 1.0
        if self.algorithm.trains_on == "steps":
            steps = trainable_steps(experience, share)
        else:
            steps = noisy_steps(experience, share, self.min_sigma)
        shuffled = shuffled_steps(steps, ids, seed)
        return shuffled if self.choice == "first" else random_share(shuffled, self.fraction)


def _moved(experience: ExperienceDiffusion, to_device: Callable[[T], T]) -> ExperienceDiffusion:
    """The same on the device, except the ids, by which the host seeds noise."""
    moved = copy(experience).apply(to_device)
    moved.sample_id, moved.group_id = experience.sample_id, experience.group_id
    return moved


def step_slices(experts: Sequence[Hashable], steps_per_forward: int) -> list[slice]:
    """Columns of a plan that share a forward: at most `steps_per_forward`, and all of the same experts.

    experts (n): what serves each column, as `grouped_steps` has ordered them.
    """
    slices, start = [], 0
    for column in range(1, len(experts) + 1):
        ends = column == len(experts) or experts[column] != experts[start]
        if ends or column - start == steps_per_forward:
            slices.append(slice(start, column))
            start = column
    return slices


def plan_updates(
    buffer: NaiveReplayBuffer, steps: Sequence[Sequence[MicroBatch]], only_advantages_count: bool
) -> list[tuple[list[MicroBatch], int]]:
    """The updates of one pass over the buffer, whose samples are counted together: of each the micro-batches of this
    rank, and the valid samples over all ranks, of which at least one is counted. A collective.

    Args:
        buffer: with the samples.
        steps: micro-batches of this rank, of each update.
        only_advantages_count: see `without_zero_advantages`; what it leaves out the mean counts all the same.
    """
    kept, counts = [], []
    for micro_batches in steps:
        own, left_out = list(micro_batches), 0
        if only_advantages_count:
            own, left_out = without_zero_advantages(buffer, micro_batches)
        planned = [index for each in own if not each.filler for index in each.indices]
        kept.append(own)
        counts.append((left_out + sum(bool(buffer[index].valid) for index in planned)) * buffer.counts)
    totals = collectives.all_reduce_sum(torch.tensor(counts)).tolist()
    return [(own, max(total, 1)) for own, total in zip(kept, totals)]


def without_zero_advantages(
    buffer: NaiveReplayBuffer, micro_batches: Sequence[MicroBatch]
) -> tuple[list[MicroBatch], int]:
    """Micro-batches of the samples whose advantage is not 0, and how many valid ones of this rank they leave out.

    Where a loss is its samples' advantages times something, the others add 0 to it and to its gradient. Every rank gets
    the same number of micro-batches, at least one: an optimizer step needs a backward. A collective.
    """
    planned = [index for each in micro_batches if not each.filler for index in each.indices]
    kept = [index for index in planned if bool(buffer[index].advantages.any())]
    left_out = sum(bool(buffer[index].valid) for index in set(planned) - set(kept))
    if not collectives.all_reduce_max(torch.tensor(float(len(planned) - len(kept)))).item():
        return list(micro_batches), 0
    needed = max(1, -(-len(kept) // buffer.sample_batch_size))
    count = int(collectives.all_reduce_max(torch.tensor(float(needed))).item())
    bounds = [len(kept) * each // count for each in range(count + 1)]
    parts = [kept[start:end] for start, end in zip(bounds, bounds[1:])]
    return [MicroBatch(part) if part else MicroBatch([0], filler=True) for part in parts], left_out


@dataclass
class RewardUpdate:
    """Reward FL: no replay; the gradient goes through the decoded images of this very forward.

    score: the differentiable reward of (media, rows). micro_batch_size: samples a forward. name: of the reward.
    """

    engine: TrainEngine
    sampling: DiffusionSampling
    loss: Loss
    score: Callable[[T, DrawingBatch], DifferentiableScore]
    micro_batch_size: int
    name: str

    def step(
        self, requests: DrawingBatch, context: LossContext, step: int, epoch: int, metrics: MetricsAccumulator
    ) -> tuple[StepResult, Drawn]:
        """One guarded step over this rank's samples of a train batch, and what was drawn for it. A collective.

        Args:
            requests: the samples.
            context: for the loss.
            step: of the policy, for the noise.
            epoch: pass over the step's samples; each draws noise of its own.
            metrics: what those of the loss are added to.
        """
        drawn: list[tuple[T, T, T]] = []  # media (B, 3, …), scores (B) and valid (B) bool, on the host
        new: list[tuple[T, DifferentiableScore]] = []  # of the present micro-batch
        host = HostCopies()
        encoded = self.sampling.encoded(requests)
        total, purpose = float(len(requests) * collectives.world_size()), f"noise/{epoch}" if epoch else "noise"
        for start in range(0, len(requests), self.micro_batch_size):
            own = slice(start, start + self.micro_batch_size)
            part, conditions = requests.select(own), self.sampling.on_device(encoded[own])
            schedule = self.sampling.sampler.schedule(self.sampling.model, self.sampling.latent_shape)
            noise = self._starting_noise(part, conditions, step, purpose)
            noise = noise * self.sampling.model.family.starting_scale(float(schedule[1][0]))
            reward = partial(self._differentiable, part, new, host)
            outputs = self.loss.loss(context, noise, conditions, schedule, reward, total)
            last = start + self.micro_batch_size >= len(requests)
            media, scored = new.pop()
            _add_loss(metrics, outputs, scored.valid.sum(), last, first=True)
            self.engine.accumulate(outputs.loss, last)
            drawn.append((media, host.of(scored.scores.detach()), host.of(scored.valid)))
        host.wait()
        media, scores, valid = (torch.cat(parts) for parts in zip(*drawn))
        check_finite(scores, valid, self.name)
        return self.engine.step(), Drawn(requests, [], media, RewardOutput(scores, {}, valid), policy_version=step)

    def _starting_noise(self, requests: DrawingBatch, conditions: dict[str, T], step: int, purpose: str) -> T:
        batch = self.sampling.batch(requests, conditions, step, purpose)
        if batch.latents is not None:
            return batch.latents
        generators = sample_generators(self.sampling.run_seed, step, requests.sample_ids.tolist(), purpose)
        return draw_noise(batch.latent_shape, generators, torch.float32, self.sampling.model.policy.device)

    def _differentiable(
        self, requests: DrawingBatch, new: list[tuple[T, DifferentiableScore]], host: HostCopies, media: T
    ) -> DifferentiableScore:
        scored = self.score(media, requests)
        new.append((host.of(media.detach().clamp(0, 1)), scored))
        return scored


def _add_loss(
    metrics: MetricsAccumulator, outputs: LossOutputs, count: int | T, last: bool, first: bool, counts: bool = True
) -> None:
    """Record one micro-batch's loss and metrics; loss and shares are sums over those of an update, means over updates.

    counts: whether this rank is the one that adds them, of several that have the same samples. Raises ConfigError for
    what is no loss.
    """
    if not isinstance(outputs, LossOutputs) or not isinstance(outputs.loss, T) or outputs.loss.dim():
        made = getattr(outputs, "loss", outputs)
        told = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, T) else f"a {type(made).__name__}"
        raise ConfigError(f"the diffusion algorithm's loss gave {told}; it must give LossOutputs with a scalar loss")
    if last and not outputs.loss.requires_grad:  # that of the last forward reaches all trained weights
        raise ConfigError("the diffusion algorithm's loss has no gradient: make it of the policy's predictions")
    check_given("the diffusion algorithm's loss", outputs.metrics | outputs.means | outputs.maxima)
    for name, share in (outputs.metrics | {"loss": outputs.loss.detach()}).items():
        metrics.add(name, share if counts else 0.0, 1.0 if last and collectives.is_rank_0() else 0.0)
    for name, value in outputs.means.items():
        own = outputs.counts.get(name, count)
        metrics.add(_NAMES.get(name, name), value * own if counts else 0.0, own if counts else 0.0)
    for name, value in outputs.maxima.items():
        metrics.add_max(name, value)
    if first and "logp_diff_max" in outputs.maxima:
        metrics.add_max("ratio_max_dev_first", torch.expm1(torch.as_tensor(outputs.maxima["logp_diff_max"])))
