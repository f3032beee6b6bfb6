"""Diffusion algorithms by name: each a loss on tensors and the rule by which its rollouts are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...config.diffusion import DiffusionRunConfig
from .ddpo import DDPO, DPOK
from .flow_grpo import FlowGRPO
from .nft import DiffusionNFT
from .reward_fl import RewardFL

Loss = FlowGRPO | DiffusionNFT | RewardFL


@dataclass(frozen=True)
class DiffusionAlgorithm:
    """build: the loss from a run's configuration. prediction: what the model must predict (flow or epsilon; None for
    both). trains_on: 'steps' of an SDE, 'data' (finished samples), or 'reward' (its gradient; no replay). old_policy:
    rollouts come from a decayed copy of the weights."""

    build: Callable[[DiffusionRunConfig], Loss]
    prediction: str | None = "flow"
    trains_on: str = "steps"
    old_policy: bool = False


def training_guidance(config: DiffusionRunConfig) -> float:
    """Guidance scale of the training forward: the rollout's, or none without cfg_in_training."""
    return config.sampling.guidance_scale if config.algorithm.cfg_in_training else 1.0


def _clipped(kind: type[FlowGRPO], rule: str | None = None) -> Callable[[DiffusionRunConfig], FlowGRPO]:
    def build(config: DiffusionRunConfig) -> FlowGRPO:
        sampling, algorithm = config.sampling, config.algorithm
        return kind(
            rule=rule or {"sde": "flow_grpo", "cps": "cps"}[config.trajectory],
            noise_level=sampling.noise_level,
            log_prob=sampling.log_prob,
            guidance_scale=training_guidance(config),
            clip_range=algorithm.clip_range,
            beta=algorithm.beta,
            kl_form=algorithm.kl_form,
            guard=algorithm.grpo_guard,
        )

    return build


def _nft(config: DiffusionRunConfig) -> DiffusionNFT:
    algorithm = config.algorithm
    return DiffusionNFT(
        beta=algorithm.nft_beta,
        adv_max=algorithm.adv_clip_max,
        adv_mode=algorithm.adv_mode,
        kl_beta=algorithm.nft_kl_beta,
        guidance_scale=training_guidance(config),
    )


def reward_fl_settings(config: DiffusionRunConfig) -> RewardFL:
    """Reward FL's loss, which also knows the steps that carry gradient."""
    algorithm = config.algorithm
    return RewardFL(
        num_inference_steps=config.sampling.num_steps,
        mid_timestep=algorithm.mid_timestep,
        final_timestep=algorithm.final_timestep,
        min_timestep_boundary=algorithm.min_timestep_boundary,
        max_timestep_boundary=algorithm.max_timestep_boundary,
        guidance_scale=training_guidance(config),
        weight=algorithm.reward_fl_weight,
        score_mean=algorithm.score_mean,
        score_std=algorithm.score_std,
        kl_beta=algorithm.beta,
    )


DIFFUSION_ALGORITHMS: dict[str, DiffusionAlgorithm] = {
    "flow_grpo": DiffusionAlgorithm(_clipped(FlowGRPO)),
    "dance_grpo": DiffusionAlgorithm(_clipped(FlowGRPO, "dance")),
    "diffusion_nft": DiffusionAlgorithm(_nft, trains_on="data", old_policy=True),
    "ddpo": DiffusionAlgorithm(_clipped(DDPO, "ddim"), prediction="epsilon"),
    "dpok": DiffusionAlgorithm(_clipped(DPOK, "ddim"), prediction="epsilon"),
    "reward_fl": DiffusionAlgorithm(reward_fl_settings, trains_on="reward"),
}
