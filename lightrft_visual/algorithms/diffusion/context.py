"""What every diffusion loss is given and returns, and the forward process of losses on finished samples.

There noise is added anew, and the model is asked to name it. The squared error of that answer, averaged over latent
dimensions, is minus the log-likelihood of the sample up to a weight of the timestep: what AWM, DGPO, Diffusion-DPO and
reward-weighted regression share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ...config.diffusion import DiffusionRunConfig
from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightCopy
from ...rollout.diffusion_sampler import draw_noise, per_sample
from ...runtime.seeding import derive_seed
from ..loss_terms import LossOutputs
from .denoising_batch import DenoisingBatch

T = torch.Tensor
LEAST_ERROR = 1e-5  # that an error is divided by


@dataclass
class LossContext:
    """velocity: the training engine, or the policy itself, called as f(latents, timesteps, conditions, guidance_scale)
    with gradients; policy: for its reference; old: the rollout weights of DiffusionNFT; seed: of forward noise, derived
    from run seed and policy step; on_policy: the weights are still those of the rollout, so importance ratios are 1;
    teacher: the model of on-policy distillation, called as velocity is."""

    velocity: Callable[..., T]
    policy: DiffusionPolicy
    old: WeightCopy | None = None
    seed: int = 0
    on_policy: bool = False
    teacher: Callable[..., T] | None = None

    def by_reference(self, inputs: tuple) -> T:
        """The reference's answer (M, …) to arguments of `velocity`, without gradient."""
        with torch.no_grad(), self.policy.reference():
            return self.velocity(*inputs)

    def by_rollouts(self, inputs: tuple) -> T:
        """The same of the weights that drew the rollout. Raises ValueError where they were not kept."""
        if self.old is None:
            raise ValueError("this loss needs the rollout policy's weights in the context")
        with torch.no_grad(), self.old.swapped():
            return self.velocity(*inputs)


def weighted_mean(values: T, valid: T) -> T:
    """Mean of (M) values over valid samples, a scalar on their device; 0 when there is none."""
    weight = valid.to(values.dtype)
    return (torch.where(valid.bool(), values, 0.0).sum() / weight.sum().clamp_min(1)).detach()


def summed(
    losses: T,
    valid: T,
    denominator: float | T,
    means: Mapping[str, T],
    kl: T | None = None,
    kl_weight: float | T = 0.0,
    maxima: Mapping[str, T] | None = None,
) -> LossOutputs:
    """Sum of (M) losses over valid samples / denominator, so that micro-batches and ranks add up to one batch.

    Args:
        losses: (M).
        valid: (M) bool.
        denominator: that of the update.
        means: metrics, means over valid samples.
        kl: (M) to the reference, which is added and reported as `kl`; None without one.
        kl_weight: what it is multiplied by, of all samples or of each (M).
        maxima: metrics, maxima over valid samples.
    """
    if kl is not None:
        losses, means = losses + kl_weight * kl, {**means, "kl": weighted_mean(kl.detach(), valid)}
    return LossOutputs((losses * valid).sum() / denominator, means=dict(means), maxima=dict(maxima or {}))


class DiffusionLoss(Protocol):
    """What a diffusion algorithm trains with, but for those that train on the reward's gradient."""

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """The micro-batch's share of the loss of an update, and its metrics.

        Args:
            context: the model, and those that it is compared with.
            batch: M samples, each at one step.
            denominator: of the sum over valid samples: that of the whole update, so that micro-batches and ranks add
                up to one batch.
        """
        ...


def training_guidance(config: DiffusionRunConfig) -> float:
    """Guidance scale of the training forward: the rollout's, or none without cfg_in_training or rollouts."""
    return config.sampling.guidance_scale if config.algorithm.cfg_in_training and not config.offline else 1.0


class ConfiguredLoss(DiffusionLoss):
    """A loss that reads its settings, by their names, of the configuration of a run."""

    def __init__(self, config: DiffusionRunConfig) -> None:
        self.settings, self.guidance_scale = config.algorithm, training_guidance(config)


def forward_noise(seed: int, batch: DenoisingBatch, shared: bool = False) -> T:
    """(M, …) unit normal that depends on the seed, the sample and the step only, not on rank or micro-batch.

    Args:
        seed: of the update.
        batch: M samples, each at one step.
        shared: samples of one group get the same noise.
    """
    purpose, keys = ("forward/group", batch.group_id) if shared else ("forward", batch.sample_id)
    seeds = [derive_seed(seed, purpose, *named) for named in zip(keys.tolist(), batch.steps.tolist())]
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    return draw_noise(batch.data.shape[1:], generators, batch.data.dtype, batch.data.device)


def asked(
    context: LossContext, batch: DenoisingBatch, guidance_scale: float, shared: bool = False
) -> tuple[tuple[T, T, dict[str, T], float], T]:
    """What the model is asked about finished samples with noise, as arguments of `velocity`, and the right answer.

    Args:
        context: for its seed and what its model predicts.
        batch: M samples, each at one step.
        guidance_scale: of the training forward.
        shared: samples of one group get the same noise.
    """
    noise, when = forward_noise(context.seed, batch, shared), per_sample(batch.sigma, batch.data)
    if context.policy.family.prediction == "flow":
        mixed, target = (1 - when) * batch.data + when * noise, noise - batch.data
    else:  # DDIM
        mixed, target = (1 - when.square()).sqrt() * batch.data + when * noise, noise
    return (mixed, batch.timesteps, batch.conditions, guidance_scale), target


def squared_error(predicted: T, target: T) -> T:
    """(M) mean over latent dimensions of (M, …)."""
    return (predicted - target).square().flatten(1).mean(dim=1)


def scaled_error(predicted: T, target: T) -> T:
    """(M) mean squared error over the mean absolute one, which carries no gradient."""
    weight = (predicted - target).detach().abs().flatten(1).mean(dim=1).clamp_min(LEAST_ERROR)
    return squared_error(predicted, target) / weight
