"""From rollouts to training rows: one row is one sample at one denoising step."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from ...experience.diffusion_sampling import KeptSteps, SamplingResult, first_of_drawn, share_of_steps
from ...experience.types import BatchLayout, ExperienceDiffusion
from ...experience.vision import Conditions, joined, stacked, text_lengths
from ...runtime.host_copies import taken, to_device
from ...runtime.seeding import derive_seed

T = torch.Tensor
STOCHASTIC = "stochastic"
ROLLOUT_MEANS = "rollout_means"


@dataclass
class DenoisingBatch:
    """M rows: the step that row m trains on. x, x_next (M, …); sigma, sigma_next, timesteps, log_probs, advantages (M);
    data (M, …) the finished latents; valid (M) bool; sample_id, steps (M) long, which name the row; group_id (M) long;
    these three may be on the host, where noise is seeded by them, whatever device the others are on;
    conditions {name: (M, …)}; schedule (M, K+1) the sigmas of all steps; rollout_means (M, …) or None; coupling (M) or
    None, see `preference.py`; kept: the rows' steps as the rollout has made them, with their graph, or None."""

    x: T
    x_next: T
    timesteps: T
    sigma: T
    sigma_next: T
    log_probs: T
    advantages: T
    data: T
    valid: T
    sample_id: T
    group_id: T
    steps: T
    conditions: dict[str, T]
    schedule: T
    rollout_means: T | None = None
    coupling: T | None = None
    kept: KeptSteps | None = None

    def __len__(self) -> int:
        return self.x.shape[0]


def experience_of(
    result: SamplingResult,
    conditions: dict[str, T],
    *,
    group_id: T,
    sample_id: T,
    policy_version: int = 0,
    shared: list[Conditions] | None = None,
) -> ExperienceDiffusion:
    """The batch of experience of one sampler call; advantages (B) start at 0 and valid (B) at true.

    An ODE rollout keeps only its finished latents, as a trajectory of one point: (B, 1, …).

    Args:
        result: of B samples.
        conditions: {name: (B, …)} of the samples' own.
        group_id: (B) long, of their prompts.
        sample_id: (B) long, which no other sample of the run has.
        policy_version: of the weights that drew them.
        shared: conditions that each sample refers to, beside its own ones.
    """
    count, steps = result.latents.shape[0], len(result.sigmas)
    sigmas = torch.cat([result.sigmas, result.sigmas.new_zeros(1)])
    stochastic = torch.zeros(steps, dtype=torch.bool) if result.stochastic is None else result.stochastic
    info = {STOCHASTIC: stochastic.expand(count, -1).clone()}
    if result.means is not None:
        info[ROLLOUT_MEANS] = result.means
    return ExperienceDiffusion(
        latents=result.latents[:, None] if result.trajectory is None else result.trajectory,
        timesteps=result.timesteps.expand(count, -1).clone(),
        log_probs=torch.zeros(count, steps) if result.log_probs is None else result.log_probs,
        prompt_embeds=conditions,
        advantages=torch.zeros(count),
        info=info,
        sigmas=sigmas.expand(count, -1).clone(),
        group_id=group_id,
        sample_id=sample_id,
        policy_version=torch.full((count,), policy_version),
        valid=torch.ones(count, dtype=torch.bool),
        shared_embeds=shared,
        layout=BatchLayout(lengths=text_lengths(conditions)),
    )


def trainable_steps(experience: ExperienceDiffusion, fraction: float = 1.0) -> T:
    """(B, n) step indices that an SDE loss trains on: the stochastic ones, of which the first `fraction` are kept.

    The same number for every sample, as all share one schedule and window.
    """
    stochastic = experience.info[STOCHASTIC]
    return first_share(stochastic[0], fraction).expand(stochastic.shape[0], -1)


def first_share(stochastic: T, fraction: float) -> T:
    """(n) indices of the first `fraction` of the steps that are marked in (K) bool, and at least one."""
    steps = stochastic.nonzero()[:, 0]
    return steps[: first_of_drawn(len(steps), fraction)]


def noisy_steps(experience: ExperienceDiffusion, fraction: float = 1.0, lowest: float = 0.0) -> T:
    """(B, n) step indices that a loss on finished samples trains on.

    At sigma 0 the sample itself is the model's input, and its loss is 0 for every model.

    Args:
        experience: B samples.
        fraction: the first so many of the steps with sigma above 0.
        lowest: sigma that they have at least; the first step alone, where none has as much.
    """
    sigmas = experience.sigmas[0, :-1]
    count = int(((sigmas > 0) & (sigmas >= lowest)).sum())
    kept = torch.arange(share_of_steps(count, fraction), device=experience.sigmas.device)
    return kept.expand(experience.sigmas.shape[0], -1)


def shuffled_steps(steps: T, ids: T, seed: int) -> T:
    """(B, n) step indices, each sample's in an order that only the seed and its id decide.

    Args:
        steps: (B, n).
        ids: (B) of samples, or of groups whose samples go through the same steps.
        seed: of the update.
    """
    orders = []
    for sample in ids.tolist():
        generator = torch.Generator().manual_seed(derive_seed(seed, "steps", sample))
        orders.append(torch.randperm(steps.shape[1], generator=generator))
    return steps.gather(1, torch.stack(orders).to(steps.device))


def random_share(shuffled: T, fraction: float) -> T:
    """The first `fraction` of (B, n) steps that are in random order: a random subset of each sample's own."""
    return shuffled[:, : share_of_steps(shuffled.shape[1], fraction)]


def grouped_steps(steps: T, experts: T) -> T:
    """(B, n) step indices, each row's order kept within an expert: those of expert 0 first, and so on.

    experts (B, n): which network serves each step. All samples then go through one network at a time, so that a
    micro-batch is one forward and no rank has to run a network that only another rank needs.
    """
    return steps.gather(1, experts.to(steps.device).argsort(dim=1, stable=True))


def samples_at(experience: ExperienceDiffusion, steps: T) -> DenoisingBatch:
    """The row of each sample at its own step. steps (B) long, on any device, where the rows' `steps` stay; x and x_next
    of ODE rollouts are the finished latents."""
    batch, named = torch.arange(experience.latents.shape[0], device=experience.latents.device), steps
    steps = to_device(steps, batch.device)
    last = experience.latents.shape[1] - 1
    advantages = experience.advantages if experience.advantages.dim() == 1 else experience.advantages[batch, steps]
    means = experience.info.get(ROLLOUT_MEANS)
    conditions = experience.prompt_embeds
    if experience.shared_embeds is not None:
        conditions = conditions | stacked(experience.shared_embeds, batch.device)
    return DenoisingBatch(
        x=experience.latents[batch, steps.clamp(max=last)],
        x_next=experience.latents[batch, (steps + 1).clamp(max=last)],
        timesteps=taken(experience.timesteps, steps),
        sigma=experience.sigmas[batch, steps],
        sigma_next=experience.sigmas[batch, steps + 1],
        log_probs=experience.log_probs[batch, steps],
        advantages=advantages,
        data=experience.latents[:, -1],
        valid=experience.valid,
        sample_id=experience.sample_id,
        group_id=experience.group_id,
        steps=named,
        conditions=conditions,
        schedule=experience.sigmas,
        rollout_means=None if means is None else means[batch, steps],
    )


def batch_at(experience: ExperienceDiffusion, steps: T) -> DenoisingBatch:
    """The rows of each sample at several steps (B, k), in one batch of B * k: all samples at the first, and so on."""
    return _joined([samples_at(experience, column) for column in steps.unbind(1)])


def _joined(parts: list[DenoisingBatch]) -> DenoisingBatch:
    if len(parts) == 1:
        return parts[0]
    made: dict[str, Any] = {}
    for each in fields(DenoisingBatch):
        values = [getattr(part, each.name) for part in parts]
        if values[0] is None:
            made[each.name] = None
        elif isinstance(values[0], dict):
            made[each.name] = {name: joined([value[name] for value in values]) for name in values[0]}
        else:
            made[each.name] = joined(values)
    return DenoisingBatch(**made)
