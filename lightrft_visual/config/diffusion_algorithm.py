"""The section of a diffusion run's configuration that says what is optimised; see diffusion.py for the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from . import registry
from .constraints import NonNegativeFloat, PositiveFloat, Section, one_of, registered, require, within

AWM_WEIGHTINGS = ("uniform", "time", "time_squared", "huber")


@dataclass
class DiffusionAlgorithmConfig(Section):
    """The loss and its settings; formulas and sources in docs/diffusion.md."""

    diffusion_algorithm: Annotated[str, registered(registry.diffusion_algorithms)] = "flow_grpo"
    clip_range: PositiveFloat | None = None  # default: 1e-4, awm 1
    adv_clip_max: NonNegativeFloat = 5.0  # advantages are clamped to ±this; 0 turns the clamp off
    global_std: bool = False  # divide by the std of all rewards instead of the group's
    gdpo: bool = False  # normalise each reward in its group, then sum by weight, then over the batch (2601.05242)
    beta: NonNegativeFloat = 0.0  # weight of the KL to the reference; not of diffusion_nft
    kl_form: Annotated[str, one_of("full", "published")] = "full"  # full: s² holds |dt|; published: without
    timestep_fraction: Annotated[float, within("(0, 1]")] = 1.0  # share of the stochastic steps to train on
    timestep_choice: Annotated[str | None, one_of("first", "random")] = (
        None  # which ones: the first, or each sample's own; default: random for dance_grpo and diffusion_nft
    )
    cfg_in_training: bool = True  # guide the training forward as the rollout was
    detach_guidance: bool = False  # no gradient through the unguided branch, as in Flow-GRPO's code
    grpo_guard: bool = False  # arXiv 2510.22319
    nft_beta: PositiveFloat = 1.0
    nft_kl_beta: NonNegativeFloat = 1e-4
    decay_type: Annotated[int | None, one_of(0, 1, 2, 3)] = None  # of the old policy; default: 1, awm 3
    decay_counts: Annotated[str, one_of("updates", "rollouts")] = "updates"  # n of the decay: its code's, or steps
    adv_mode: Annotated[str, one_of("all", "positive_only", "negative_only", "one_only", "binary")] = "all"
    awm_weighting: Annotated[str, one_of(*AWM_WEIGHTINGS)] = "huber"  # of the error of each timestep
    awm_power: Annotated[float, within("(0, 1]")] = 0.25  # of huber
    old_beta: NonNegativeFloat = 1.0  # AWM: weight of the distance to the rollout policy's velocity
    rwr_temperature: PositiveFloat = 1.0  # a sample's weight is exp(A / this)
    dppo_threshold: PositiveFloat = 1e-5  # flow_dppo: KL to the rollout policy from which on a step may be masked
    dpo_beta: PositiveFloat | None = None  # sharpness of the preference; default: dgpo 100, diffusion_dpo 5000
    dpo_reference: Annotated[str, one_of("base", "old")] = "base"  # what errors are compared with; old: of the rollouts
    min_sigma: Annotated[float | None, within("[0, 1)")] = None  # losses on finished samples: least noise that is added
    mid_timestep: int = 4  # Reward FL: first step with gradient
    final_timestep: int = 7  # Reward FL: last step, from which the data is predicted
    min_timestep_boundary: float = 0.0  # Reward FL: shares of the schedule's 1,000 timesteps, from noise on; the
    max_timestep_boundary: float = 1.0  # expert that serves those in between is the one that trains
    reward_fl_weight: float = 1.0
    score_mean: float = 0.0
    score_std: PositiveFloat = 1.0
    score_target: float | None = None  # Reward FL: images that reach this score have no gradient, as in ReFL's hinge
    # Of Reward FL: shape_match (the default with the embedded prompts), face_similarity, or path.py:function.
    differentiable_reward: str | None = None
    differentiable_kwargs: dict[str, Any] = field(default_factory=dict)  # settings of a named one, {setting: value}

    @property
    def entry(self) -> registry.DiffusionAlgorithm:
        """What the algorithm needs."""
        return registry.diffusion_algorithms[self.diffusion_algorithm]

    def check(self) -> None:
        """Settings that belong to some algorithms only."""
        require(
            not self.entry.clipped_advantages or self.adv_clip_max > 0,
            f"{self.diffusion_algorithm} scales advantages by adv_clip_max: it must be positive",
        )
        require(not self.gdpo or self.entry.grouped, f"gdpo compares rewards in groups; {self.entry.name} has none")
        require(not (self.gdpo and self.global_std), "gdpo divides each reward by its group's std, not by a global_std")
        guarded = " and ".join(each.name for each in registry.diffusion_algorithms if each.guard)
        require(not self.grpo_guard or self.entry.guard, f"grpo_guard belongs to {guarded}")
