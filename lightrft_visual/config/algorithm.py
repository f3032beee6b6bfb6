"""The section of a diffusion run's configuration that says what is optimised; see diffusion.py for the others."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from . import kinds, registry
from .constraints import (
    Constraint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    one_of,
    registered,
    require,
    within,
)

TokenShare = replace(within("[0, 1]"), meaning=lambda share: share or 1.0)
DualClip = Constraint(lambda value: value > 1, "it must be larger than 1")


@dataclass
class AlgorithmConfig(Section):
    """Advantages, losses, KL and reward shaping; formulas and sources in docs/algorithms.md."""

    advantage_estimator: Annotated[str, registered(registry.advantage_estimators)] = "group_norm"
    policy_loss: Annotated[str, registered(registry.policy_losses)] = "ppo"
    loss_agg_mode: Annotated[str, registered(registry.aggregations)] = "token-mean"
    eps_clip: PositiveFloat = 0.2  # ratios are clipped to 1 - eps_clip, 1 + eps_clip
    eps_clip_high: PositiveFloat | None = None  # clip-higher (DAPO); default: eps_clip
    dual_clip: Annotated[float | None, DualClip] = None  # bounds the loss of negative advantages
    value_clip: NonNegativeFloat = 0.2  # how far new values may go from old ones
    gamma: Annotated[float, within("[0, 1]")] = 1.0  # discount a token
    lambd: Annotated[float, within("[0, 1]")] = 0.95  # of GAE
    init_kl_coef: NonNegativeFloat = 0.01  # weight of the divergence from the reference at the start; 0: no reference
    ref_update_steps: NonNegativeInt = 0  # steps after which the reference is moved to the policy; 0: it never moves
    ref_update_mixup: Annotated[float, within("(0, 1]")] = 1.0  # share of the policy in the moved reference
    kl_target: PositiveFloat | None = None  # mean KL per token; set: adaptive controller
    kl_horizon: PositiveInt = 10_000  # samples in which an adaptive weight moves by about a fifth at most
    kl_estimator: Annotated[str, registered(registry.kl_estimators)] = "k1"
    use_kl_loss: bool = False  # KL as a loss term instead of in the reward
    entropy_coef: float = 0.0  # weight of an entropy bonus in the loss
    drawing_entropy_coef: float | None = None  # of the tokens of images; default: entropy_coef
    entropy_target: PositiveFloat | None = None  # nats; set: entropy_coef moves so that the entropy stays above it
    entropy_coef_step: PositiveFloat = 1e-4  # by which it moves each step, for entropy_target
    entropy_coef_max: PositiveFloat = 5e-3  # and its upper end; the lower one is 0
    high_entropy_token_ratio: Annotated[float, TokenShare] = 1.0  # top share of tokens by entropy (2506.01939); 0: all
    cpgd_alpha: NonNegativeFloat = 0.0  # weight of the policy-drift term of the cpgd loss
    vespo_k_pos: PositiveFloat = 2.0  # vespo's weight W^k exp(lambda (1 - W)), for positive advantages
    vespo_lambda_pos: PositiveFloat = 3.0  # decay of weights where advantages are positive
    vespo_k_neg: PositiveFloat = 3.0  # and for negative ones
    vespo_lambda_neg: PositiveFloat = 2.0  # decay of weights where advantages are negative
    cov_share: Annotated[float, within("(0, 1]")] = 2e-4  # of all tokens, that clip_cov and kl_cov choose
    clip_cov_low: float = 1.0  # clip_cov chooses among tokens whose covariance lies between these
    clip_cov_high: float = 5.0  # covariances above it are left alone
    kl_cov_coef: NonNegativeFloat = 1.0  # weight of |log ratio| at the tokens that kl_cov chooses
    # mean log(old / policy) of a sequence from which on its tokens of negative advantage leave the loss; none: no mask
    off_policy_delta: NonNegativeFloat | None = None
    tis_mode: Annotated[str, registered(registry.tis_modes)] = "off"  # weights for rollout/trainer mismatch
    sapo_tau_pos: PositiveFloat = 1.0  # sharpness of the sapo loss's gate, for positive advantages
    sapo_tau_neg: PositiveFloat = 1.05  # and for the others
    tis_cap: PositiveFloat = 2.0  # largest weight of truncated importance sampling
    tis_mask: bool = False  # drop tokens (sequences) above the cap instead of truncating their weight
    tis_floor: NonNegativeFloat = 0.0  # tis_mask drops those below it too (IcePop); 0 for none
    answer_loss_weight: NonNegativeFloat = 1.0  # of a model that also draws: of the loss of answers in text
    drawing_loss_weight: NonNegativeFloat = 1.0  # and of that of images; each is a mean over its own kind
    mask_truncated: bool = False  # answers cut at generate_max_len stay in their group's statistics, not in the loss
    papo_coef: NonNegativeFloat = 0.0  # weight of PAPO's perception loss: KL between seeing and half-hidden images
    papo_mask_ratio: Annotated[float, within("(0, 1]")] = 0.6  # share of image patches that are hidden for it
    papo_entropy_coef: NonNegativeFloat = 0.0  # weight against the entropy of both policies (double entropy loss)
    teacher_coef: NonNegativeFloat = 0.0  # weight of log teacher - log policy in each token's advantage
    selective_replay: NonNegativeInt = 0  # samples of a kind kept to replace those without advantage; 0: off
    routing_replay: Annotated[str, one_of("off", "rollout", "old")] = "off"  # whose choice of experts is used again
    router_aux_loss_coef: NonNegativeFloat = 0.0  # weight of the loss that balances a mixture's experts
    overlong_buffer: bool = False  # responses near generate_max_len are penalized (DAPO)
    overlong_buffer_len: PositiveInt = 1024  # tokens before the limit where the penalty begins
    overlong_buffer_penalty_factor: NonNegativeFloat = 1.0  # the penalty at the limit
    reward_running_norm: bool = False  # rewards are divided by their running standard deviation
    reward_running_norm_minus_mean: bool = False  # and their running mean is taken off
    reward_clip: NonNegativeFloat = 0.0  # 0 turns it off; else rewards are clamped into [-reward_clip, reward_clip]
    advantages_norm: bool = False  # advantages of a step get mean 0 and standard deviation 1
    advantage_clip: NonNegativeFloat = 0.0  # 0 turns it off

    @property
    def estimator(self) -> kinds.AdvantageEstimator:
        """What the advantage estimator needs."""
        return registry.advantage_estimators[self.advantage_estimator]

    @property
    def reads_log_probs(self) -> bool:
        """Whether the policy's log-probs are read before its first update: by the KL to the reference, beside a critic
        or a teacher, to choose tokens by entropy or covariance, by later steps that replay samples, to note its
        experts, or by an estimator that says so."""
        return (
            self.init_kl_coef > 0
            or self.estimator.critic
            or self.estimator.reads_log_probs
            or registry.policy_losses[self.policy_loss].chooses is not None
            or self.high_entropy_token_ratio < 1
            or self.teacher_coef > 0
            or self.selective_replay > 0
            or self.routing_replay == "old"
        )

    @property
    def entropy_coefs(self) -> tuple[float, float]:
        """Of answers in text, of images."""
        drawings = self.drawing_entropy_coef
        return self.entropy_coef, self.entropy_coef if drawings is None else drawings

    @property
    def corrects_rollouts(self) -> bool:
        """Whether the loss weighs by the engine's log-probs."""
        return registry.tis_modes[self.tis_mode].corrects

    def check(self) -> None:
        """Settings that do nothing without another one, or undo it."""
        asked = [(each.name, name) for each in registry.loss_terms for name in each.settings]
        asked += [(each.name, each.setting) for each in registry.policy_masks if each.setting]
        for entry, name in asked:
            require(hasattr(self, name), f"{entry!r} is asked for by {name!r}, which is no setting of the algorithm")
        require(
            self.kl_target is None or self.init_kl_coef > 0,
            "kl_target steers a coefficient that starts at init_kl_coef: at 0 it would stay there",
        )
        require(
            self.answer_loss_weight > 0 or self.drawing_loss_weight > 0,
            "answer_loss_weight and drawing_loss_weight are both 0: nothing would be trained",
        )
        require(self.corrects_rollouts or not self.tis_mask, "tis_mask belongs to --tis_mode token or sequence")
        require(
            self.advantage_estimator != "distillation" or self.teacher_coef > 0,
            "advantage_estimator distillation learns from a teacher alone: it needs a teacher_coef above 0",
        )
        require(
            self.selective_replay == 0 or self.estimator.grouped,
            f"selective_replay replaces samples of groups whose rewards are all equal: advantage_estimator "
            f"{self.advantage_estimator} compares no groups",
        )
        require(self.papo_coef > 0 or self.papo_entropy_coef == 0, "papo_entropy_coef belongs to a papo_coef above 0")
        require(
            self.ref_update_steps == 0 or self.init_kl_coef > 0,
            "ref_update_steps needs a KL to the reference: a positive init_kl_coef",
        )
        require(self.ref_update_steps > 0 or self.ref_update_mixup == 1, "ref_update_mixup belongs to ref_update_steps")
        require(
            self.clip_cov_low < self.clip_cov_high,
            f"clip_cov_low {self.clip_cov_low} is not below clip_cov_high {self.clip_cov_high}",
        )
        require(
            self.entropy_target is None or 0 <= self.entropy_coef <= self.entropy_coef_max,
            f"entropy_target moves entropy_coef between 0 and entropy_coef_max: it cannot start at {self.entropy_coef}",
        )
        require(self.tis_mask or self.tis_floor == 0, "tis_floor belongs to --tis_mask true")
        require(self.tis_floor < self.tis_cap, f"tis_floor {self.tis_floor} is not below tis_cap {self.tis_cap}")
        require(
            self.reward_running_norm or not self.reward_running_norm_minus_mean,
            "reward_running_norm_minus_mean belongs to --reward_running_norm",
        )
        require(
            not self.use_kl_loss or registry.kl_estimators[self.kl_estimator].as_loss,
            f"use_kl_loss with kl_estimator {self.kl_estimator} has a gradient of expectation 0: "
            "use --kl_estimator k2 or k3",
        )


AWM_WEIGHTINGS = ("uniform", "time", "time_squared", "huber")


@dataclass
class DiffusionAlgorithmConfig(Section):
    """The loss and its settings; formulas and sources in docs/diffusion.md."""

    diffusion_algorithm: Annotated[str, registered(registry.diffusion_algorithms)] = "flow_grpo"
    clip_range: PositiveFloat | None = None  # default: 1e-4, awm 1
    adv_clip_max: NonNegativeFloat = 5.0  # advantages are clamped to ±this; 0 turns the clamp off
    global_std: bool = False  # divide by the std of all rewards instead of the group's
    gdpo: bool = False  # normalise each reward in its group, then sum by weight, then over the batch (2601.05242)
    beta: NonNegativeFloat | None = None  # weight of the KL to the base; not of diffusion_nft; default: 0, dpok 0.01
    kl_form: Annotated[str, one_of("full", "published")] = "full"  # full: s² holds |dt|; published (sde, dance): not
    timestep_fraction: Annotated[float, within("(0, 1]")] = 1.0  # share of the stochastic steps to train on
    timestep_choice: Annotated[str | None, one_of("first", "random")] = (
        None  # which: the first, or each sample's own; default: random for dance_grpo and losses on finished samples
    )
    cfg_in_training: bool = True  # guide the training forward as the rollout was
    detach_guidance: bool = False  # no gradient through the unguided branch, as in Flow-GRPO's code
    grpo_guard: bool = False  # arXiv 2510.22319
    nft_beta: PositiveFloat = 1.0  # how far the implicit policies lie from the old one
    nft_kl_beta: NonNegativeFloat = 1e-4  # weight of the divergence from the reference
    decay_type: Annotated[int | None, one_of(0, 1, 2, 3)] = None  # old policy's; default 1, awm, dgpo, diffusion_dpo 3
    decay_counts: Annotated[str, one_of("updates", "rollouts")] = "updates"  # n of the decay: its code's, or steps
    adv_mode: Annotated[str, one_of("all", "positive_only", "negative_only", "one_only", "binary")] = "all"
    awm_weighting: Annotated[str, one_of(*AWM_WEIGHTINGS)] = "huber"  # of the error of each timestep
    awm_power: Annotated[float, within("(0, 1]")] = 0.25  # of huber
    old_beta: NonNegativeFloat = 1.0  # AWM: weight of the distance to the rollout policy's velocity
    crd_beta: PositiveFloat = 1.0  # what the implicit reward of crd is multiplied by
    rwr_temperature: PositiveFloat = 1.0  # a sample's weight is exp(A / this)
    dppo_threshold: PositiveFloat = 1e-5  # flow_dppo: KL to the rollout policy from which on a step may be masked
    dpo_beta: PositiveFloat | None = None  # sharpness of the preference; default: dgpo 100, diffusion_dpo 5000
    dpo_reference: Annotated[str, one_of("base", "old")] = "base"  # what errors are compared with; old: of the rollouts
    min_sigma: Annotated[float | None, within("[0, 1)")] = None  # finished samples: least noise; default: 0, dgpo 0.3
    mid_timestep: int = 4  # Reward FL: first step with gradient
    final_timestep: int = 7  # Reward FL: last step, from which the data is predicted
    min_timestep_boundary: float = 0.0  # Reward FL: shares of the schedule's 1,000 timesteps, from noise on; the
    max_timestep_boundary: float = 1.0  # expert that serves those in between is the one that trains
    reward_fl_weight: float = 1.0  # of the reward in the loss
    score_mean: float = 0.0  # taken off scores
    score_std: PositiveFloat = 1.0  # scores are divided by it
    score_target: float | None = None  # Reward FL: images that reach this score have no gradient, as in ReFL's hinge
    # Of Reward FL: shape_match (the default with the embedded prompts), face_similarity, or path.py:function.
    differentiable_reward: str | None = None
    differentiable_kwargs: dict[str, Any] = field(default_factory=dict)  # settings of a named one, {setting: value}

    @property
    def entry(self) -> kinds.DiffusionAlgorithm:
        """What the algorithm needs."""
        return registry.diffusion_algorithms[self.diffusion_algorithm]

    def check(self) -> None:
        """Settings that belong to some algorithms only."""
        require(
            not self.entry.clipped_advantages or self.adv_clip_max > 0,
            f"{self.diffusion_algorithm} scales advantages by adv_clip_max: it must be positive",
        )
        if self.differentiable_reward is not None and ":" not in self.differentiable_reward:
            registry.differentiable_rewards[self.differentiable_reward]  # raises ConfigError with the nearest name
        require(not self.gdpo or self.entry.grouped, f"gdpo compares rewards in groups; {self.entry.name} has none")
        require(not (self.gdpo and self.global_std), "gdpo divides each reward by its group's std, not by a global_std")
        guarded = " and ".join(each.name for each in registry.diffusion_algorithms if each.guard)
        require(not self.grpo_guard or self.entry.guard, f"grpo_guard belongs to {guarded}")
