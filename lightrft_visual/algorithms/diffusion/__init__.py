"""Diffusion algorithms: from a run's configuration to the loss; config/registry.py has their names and needs.

A loss is a `context.DiffusionLoss`; where the algorithm trains on the reward's gradient, it is as `RewardFL`.
"""

from dataclasses import replace
from functools import partial

from ...config.diffusion import DiffusionRunConfig
from ...rollout.diffusion_sampler import FLOW_RULES
from .awm import AWM
from .context import training_guidance
from .crd import CenteredReward
from .ddpo import DDPO, DPOK
from .diffusion_dpo import PAIR
from .flow_dppo import FlowDPPO
from .flow_grpo import FlowGRPO
from .nft import DiffusionNFT
from .opd import OnPolicyDistillation
from .preference import GroupPreference
from .reward_fl import RewardFL
from .rwr import RewardWeighted
from .temp_flow_grpo import TempFlowGRPO

Loss = FlowGRPO | DiffusionNFT | AWM | RewardWeighted | GroupPreference | CenteredReward | RewardFL


def _clipped(kind: type[FlowGRPO], config: DiffusionRunConfig) -> FlowGRPO:
    """A loss of stochastic steps, by the rule that rollouts draw them with."""
    sampling, algorithm = config.sampling, config.algorithm
    return kind(
        rule="ddim" if issubclass(kind, DDPO) else FLOW_RULES[config.trajectory],
        noise_level=sampling.noise_level,
        log_prob=sampling.log_prob,
        guidance_scale=training_guidance(config),
        clip_range=algorithm.clip_range,
        beta=algorithm.beta,
        kl_form=algorithm.kl_form if config.trajectory in ("sde", "dance") else "full",  # else s² holds no |dt|
        guard=algorithm.grpo_guard,
    )


awm, crd, diffusion_nft, reward_fl, rwr = AWM, CenteredReward, DiffusionNFT, RewardFL, RewardWeighted
flow_grpo = dance_grpo = partial(_clipped, FlowGRPO)
temp_flow_grpo = partial(_clipped, TempFlowGRPO)
ddpo = partial(_clipped, DDPO)
dpok = partial(_clipped, DPOK)
diffusion_opd = partial(_clipped, OnPolicyDistillation)


def flow_dppo(config: DiffusionRunConfig) -> FlowGRPO:
    """Flow-DPPO's loss: a mask by the divergence in the place of the clip."""
    return replace(_clipped(FlowDPPO, config), threshold=config.algorithm.dppo_threshold)


def dgpo(config: DiffusionRunConfig) -> GroupPreference:
    """DGPO's loss on the groups of prompts."""
    return GroupPreference(config, config.sampling.n_samples_per_prompt, 1 / config.algorithm.dpo_beta)


def diffusion_dpo(config: DiffusionRunConfig) -> GroupPreference:
    """Diffusion-DPO's loss on pairs."""
    return GroupPreference(config, PAIR)
