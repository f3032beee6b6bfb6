"""The forward process, for losses on finished samples: noise is added anew, and the model is asked to name it.

The squared error of that answer, averaged over latent dimensions, is minus the log-likelihood of the sample up to a
weight of the timestep: what AWM, DGPO, Diffusion-DPO and reward-weighted regression share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...rollout.diffusion_sampler import per_sample
from ...runtime.seeding import derive_seed
from .context import LossContext
from .denoising_batch import DenoisingBatch

T = torch.Tensor
LEAST_ERROR = 1e-5  # that an error is divided by


class Noised(NamedTuple):
    """mixed (M, …): the samples with noise; target (M, …): what the model should answer there."""

    mixed: T
    target: T


def forward_noise(seed: int, batch: DenoisingBatch, shared: bool = False) -> T:
    """(M, …) unit normal that depends on the seed, the sample and the step only, not on rank or micro-batch.

    Args:
        seed: of the update.
        batch: M samples, each at one step.
        shared: samples of one group get the same noise.
    """
    shape, draws = batch.data.shape[1:], []
    purpose, keys = ("forward/group", batch.group_id) if shared else ("forward", batch.sample_id)
    for key, step in zip(keys.tolist(), batch.steps.tolist()):
        generator = torch.Generator().manual_seed(derive_seed(seed, purpose, key, step))
        draws.append(torch.randn(shape, generator=generator, dtype=batch.data.dtype))
    return torch.stack(draws).to(batch.data.device)


def add_noise(data: T, noise: T, sigma: T, prediction: str) -> Noised:
    """Samples (M, …) at sigma (M) and the target of the model's prediction.

    Args:
        data: (M, …) finished samples.
        noise: (M, …) unit normal.
        sigma: (M) in 0..1.
        prediction: 'flow': (1 - sigma) data + sigma noise, target noise - data. 'epsilon' (DDIM):
            sqrt(1 - sigma²) data + sigma noise, target the noise.
    """
    when = per_sample(sigma, data)
    if prediction == "flow":
        return Noised((1 - when) * data + when * noise, noise - data)
    return Noised((1 - when.square()).clamp_min(0).sqrt() * data + when * noise, noise)


def noised(context: LossContext, batch: DenoisingBatch, shared: bool = False) -> Noised:
    """The rows' finished samples, with noise of their own or of their group, as the context's model is asked."""
    noise = forward_noise(context.seed, batch, shared)
    return add_noise(batch.data, noise, batch.sigma, context.policy.prediction)


def squared_error(predicted: T, target: T) -> T:
    """(M) mean over latent dimensions of (M, …)."""
    return (predicted - target).square().flatten(1).mean(dim=1)


def scaled_error(predicted: T, target: T) -> T:
    """(M) mean squared error over the mean absolute one, which carries no gradient."""
    weight = (predicted - target).detach().abs().flatten(1).mean(dim=1).clamp_min(LEAST_ERROR)
    return squared_error(predicted, target) / weight
