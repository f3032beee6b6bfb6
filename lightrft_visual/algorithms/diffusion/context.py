"""What every diffusion loss is given and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightCopy
from ..loss_terms import LossOutputs

T = torch.Tensor


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
    return ((values * weight).sum() / weight.sum().clamp_min(1)).detach()


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
