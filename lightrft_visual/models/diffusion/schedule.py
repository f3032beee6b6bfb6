"""The plain flow-matching schedule, and the precision in which denoising arithmetic is done."""

from __future__ import annotations

import torch

from ...experience.diffusion_sampling import TRAIN_TIMESTEPS

T = torch.Tensor


def flow_match_schedule(num_steps: int, shift: float = 1.0) -> tuple[T, T]:
    """Timesteps (K) and sigmas (K) from 1 to 1/K, evenly spaced and then shifted: s -> shift s / (1 + (shift-1) s)."""
    sigmas = torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return (sigmas * TRAIN_TIMESTEPS).float(), sigmas.float()


def stock_flow_match_schedule(num_steps: int, shift: float = 1.0) -> tuple[T, T]:
    """That of diffusers' and FastVideo's FlowMatchEulerDiscreteScheduler with a shift: K even steps from 1 to the
    shifted 1/1000, and shifted again."""
    low = shift / TRAIN_TIMESTEPS / (1 + (shift - 1) / TRAIN_TIMESTEPS)
    sigmas = torch.linspace(1.0, low, num_steps, dtype=torch.float64)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return (sigmas * TRAIN_TIMESTEPS).float(), sigmas.float()


def upcast(tensor: T) -> T:
    """fp32, or fp64 as it was."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
