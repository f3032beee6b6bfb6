"""What every diffusion loss is given and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightCopy

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


def weighted_mean(values: T, valid: T) -> T:
    """Mean of (M) values over valid samples, a scalar on their device; 0 when there is none."""
    weight = valid.to(values.dtype)
    return ((values * weight).sum() / weight.sum().clamp_min(1)).detach()
