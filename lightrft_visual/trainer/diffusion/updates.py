"""Optimizer steps of diffusion runs: on replayed denoising steps, and by the gradient of a differentiable reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ...algorithms.diffusion import Loss
from ...algorithms.diffusion.context import LossContext, LossOutcome
from ...algorithms.diffusion.reward_fl import DifferentiableScore
from ...algorithms.diffusion.rows import grouped_steps, noisy_steps, rows_at, shuffled_steps, trainable_steps
from ...batches.experience import ExperienceDiffusion
from ...config.registry import DiffusionAlgorithm
from ...observe.metrics import MetricsAccumulator
from ...rollout.diffusion_sampler import sample_generators
from ...strategy import collectives
from ...strategy.deepspeed import StepResult, TrainEngine
from ...strategy.seeding import derive_seed
from .stages import DiffusionRows, DiffusionSampling

T = torch.Tensor
_NAMES = {"clip_fraction": "clip_frac"}


@dataclass
class ReplayUpdate:
    """One optimizer step over rows of (sample, denoising step), each sample in an order of steps of its own.

    fraction: share of the steps that is trained on.
    """

    engine: TrainEngine
    algorithm: DiffusionAlgorithm
    loss: Loss
    fraction: float

    def step(
        self,
        batches: Sequence[ExperienceDiffusion],
        context: LossContext,
        seed: int,
        metrics: MetricsAccumulator,
        first: bool,
    ) -> StepResult:
        """Losses of all micro-batches, then one guarded step. A collective. first: the first update of this rollout."""
        plans = []
        for index, experience in enumerate(batches):
            generator = torch.Generator().manual_seed(derive_seed(seed, collectives.rank(), index))
            steps = shuffled_steps(self._trained_steps(experience), generator)
            timesteps = experience.timesteps.gather(1, steps.to(experience.timesteps.device))
            plans.append(grouped_steps(steps, context.policy.family.expert_index(timesteps)))
        rows = sum(int(each.valid.sum()) * plan.shape[1] for each, plan in zip(batches, plans))
        total = collectives.all_reduce_sum(torch.tensor(float(rows))).item()
        for index, (experience, plan) in enumerate(zip(batches, plans)):
            for column in range(plan.shape[1]):
                part = rows_at(experience, plan[:, column])
                last = index == len(batches) - 1 and column == plan.shape[1] - 1
                whole = last or index == column == 0
                with context.policy.all_experts() if whole else nullcontext():
                    outcome = self.loss.loss(context, part, max(total, 1.0))
                self.engine.accumulate(outcome.loss, last)
                add_loss(metrics, outcome, int(part.valid.sum()), last, first)
        return self.engine.step()

    def _trained_steps(self, experience: ExperienceDiffusion) -> T:
        """(B, n): stochastic steps for losses on SDE steps, any step of the schedule for losses on data."""
        steps = trainable_steps if self.algorithm.trains_on == "steps" else noisy_steps
        return steps(experience, self.fraction)


class Scored(NamedTuple):
    """Pictures of a forward pass that carried the reward's gradient: media (B, 3, …), scores (B), valid (B) bool."""

    media: T
    scores: T
    valid: T


@dataclass
class RewardUpdate:
    """Reward FL: no replay; the gradient goes through the decoded pictures of this very forward.

    score: the differentiable reward of (media, rows).
    """

    engine: TrainEngine
    sampling: DiffusionSampling
    loss: Loss
    score: Callable[[T, DiffusionRows], DifferentiableScore]
    run_seed: int

    def step(
        self, batches: Sequence[DiffusionRows], context: LossContext, step: int, metrics: MetricsAccumulator
    ) -> tuple[StepResult, list[Scored]]:
        """One guarded step over all micro-batches, and what was drawn for it. A collective."""
        drawn: list[Scored] = []
        total = float(sum(map(len, batches)) * collectives.world_size())
        for rows in batches:
            conditions = self.sampling.conditions(rows)
            noise = self._starting_noise(rows, conditions, step)
            schedule = self.sampling.sampler.schedule(self.sampling.model, self.sampling.latent_shape)
            reward = partial(self._differentiable, rows, drawn)
            outcome = self.loss.loss(context, noise, conditions, schedule, reward, total)
            last = rows is batches[-1]
            self.engine.accumulate(outcome.loss, last)
            add_loss(metrics, outcome, len(rows), last, first=True)
        return self.engine.step(), drawn

    def _starting_noise(self, rows: DiffusionRows, conditions: dict[str, T], step: int) -> T:
        batch = self.sampling.batch(rows, conditions, step, "noise")
        if batch.latents is not None:
            return batch.latents
        generators = sample_generators(self.run_seed, step, rows.sample_ids.tolist())
        noise = torch.stack([torch.randn(batch.latent_shape, generator=each) for each in generators])
        return noise.to(self.sampling.model.policy.device)

    def _differentiable(self, rows: DiffusionRows, drawn: list[Scored], media: T) -> DifferentiableScore:
        scored = self.score(media, rows)
        drawn.append(Scored(media.detach().clamp(0, 1).cpu(), scored.scores.detach().cpu(), scored.valid.cpu()))
        return scored


def add_loss(metrics: MetricsAccumulator, outcome: LossOutcome, rows: int, last: bool, first: bool) -> None:
    """Record one micro-batch's loss and metrics; the loss is a sum over those of an update, a mean over updates."""
    metrics.add("loss", outcome.loss.detach(), 1.0 if last and collectives.is_rank_0() else 0.0)
    for name, value in outcome.metrics.items():
        if name == "logp_diff_max":
            metrics.add_max(name, value)
            if first:
                metrics.add_max("ratio_max_dev_first", torch.expm1(torch.tensor(value)))
        else:
            metrics.add(_NAMES.get(name, name), value * rows, rows)
