"""From a run's configuration to the settings of the sampler."""

from __future__ import annotations

from ..rollout.diffusion_sampler import NoiseConfig, SamplingConfig
from .diffusion import DiffusionRunConfig


def rollout_sampling(config: DiffusionRunConfig) -> SamplingConfig:
    """Steps and trajectory of rollouts."""
    sampling = config.sampling
    return SamplingConfig(
        num_steps=sampling.num_steps,
        scheduler=sampling.scheduler,
        trajectory=config.trajectory,
        flow_shift=sampling.flow_shift,
        timesteps=sampling.timesteps,
        sigmas=sampling.sigmas,
    )


def evaluation_sampling(config: DiffusionRunConfig) -> SamplingConfig:
    """Steps of evaluation: always an ODE, with a step count of its own, on the scheduler's schedule."""
    sampling = config.sampling
    return SamplingConfig(
        num_steps=sampling.eval_num_steps,
        scheduler=sampling.scheduler,
        trajectory="ode",
        flow_shift=sampling.flow_shift,
    )


def rollout_noise(config: DiffusionRunConfig) -> NoiseConfig:
    """How stochastic steps of rollouts are drawn and scored."""
    return NoiseConfig(
        noise_level=config.sampling.noise_level,
        window_size=config.sampling.sde_window_size,
        log_prob=config.sampling.log_prob,
        keep_means=config.algorithm.grpo_guard,
    )
