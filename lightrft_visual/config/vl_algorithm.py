"""The section of a vision-language run's configuration that says what is optimised; see vl.py for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from . import registry
from .constraints import (
    Constraint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    registered,
    require,
    within,
)

DualClip = Constraint(lambda value: value > 1, "it must be larger than 1")


@dataclass
class AlgorithmConfig(Section):
    """Advantages, losses, KL and reward shaping; formulas and sources in docs/algorithms.md."""

    advantage_estimator: Annotated[str, registered(registry.advantage_estimators)] = "group_norm"
    policy_loss: Annotated[str, registered(registry.policy_losses)] = "ppo"
    loss_agg_mode: Annotated[str, registered(registry.aggregations)] = "token-mean"
    eps_clip: PositiveFloat = 0.2
    eps_clip_high: PositiveFloat | None = None  # clip-higher (DAPO); default: eps_clip
    dual_clip: Annotated[float | None, DualClip] = None  # bounds the loss of negative advantages
    value_clip: NonNegativeFloat = 0.2
    gamma: Annotated[float, within("[0, 1]")] = 1.0
    lambd: Annotated[float, within("[0, 1]")] = 0.95
    init_kl_coef: NonNegativeFloat = 0.01
    ref_update_steps: NonNegativeInt = 0  # steps after which the reference is moved to the policy; 0: it never moves
    ref_update_mixup: Annotated[float, within("(0, 1]")] = 1.0  # share of the policy in the moved reference
    kl_target: PositiveFloat | None = None  # mean KL per token; set: adaptive controller
    kl_horizon: PositiveInt = 10_000
    kl_estimator: Annotated[str, registered(registry.kl_estimators)] = "k1"
    use_kl_loss: bool = False  # KL as a loss term instead of in the reward
    entropy_coef: float = 0.0
    drawing_entropy_coef: float | None = None  # of the tokens of images; default: entropy_coef
    high_entropy_token_ratio: Annotated[float, within("(0, 1]")] = 1.0  # top share of tokens by entropy (2506.01939)
    cpgd_alpha: NonNegativeFloat = 0.0  # weight of the policy-drift term of the cpgd loss
    tis_mode: Annotated[str, registered(registry.tis_modes)] = "off"  # weights for rollout/trainer mismatch
    sapo_tau_pos: PositiveFloat = 1.0  # sharpness of the sapo loss's gate, for positive advantages
    sapo_tau_neg: PositiveFloat = 1.05  # and for the others
    tis_cap: PositiveFloat = 2.0
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
    overlong_buffer: bool = False
    overlong_buffer_len: PositiveInt = 1024
    overlong_buffer_penalty_factor: NonNegativeFloat = 1.0
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    reward_clip: NonNegativeFloat = 0.0  # 0 turns it off; else rewards are clamped into [-reward_clip, reward_clip]
    advantages_norm: bool = False
    advantage_clip: NonNegativeFloat = 0.0  # 0 turns it off

    @property
    def estimator(self) -> registry.AdvantageEstimator:
        """What the advantage estimator needs."""
        return registry.advantage_estimators[self.advantage_estimator]

    @property
    def reads_log_probs(self) -> bool:
        """Whether the policy's log-probs are read before its first update: by the KL to the reference, beside a critic
        or a teacher, to choose tokens by entropy, by later steps that replay samples, or by an estimator that says
        so."""
        return (
            self.init_kl_coef > 0
            or self.estimator.critic
            or self.estimator.reads_log_probs
            or self.high_entropy_token_ratio < 1
            or self.teacher_coef > 0
            or self.selective_replay > 0
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
