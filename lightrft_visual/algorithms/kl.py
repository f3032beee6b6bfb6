"""KL divergence to the reference policy from log-probs of sampled tokens, and controllers of its weight."""

from collections.abc import Sequence
from typing import Any

import torch

from ..config import registry
from ..config.vl import AlgorithmConfig
from ..errors import ConfigError

T = torch.Tensor


# exp of the k3 estimator's argument is cut here: a token that the policy finds e^10 times less likely than the
# reference gives 2.2e4, not infinity. Only that side grows exponentially; the other is linear and stays as it is.
K3_MAX_LOG_RATIO = 10.0


def of_shape(made: Any, shape: Sequence[int] | None, what: str, dtype: torch.dtype | None = None) -> T:
    """What a function of the registry gave. Raises ConfigError for anything but a tensor of the shape (None: of any),
    which would be broadcast.

    Args:
        made, shape: what it gave, and what it is to give.
        what: for the message.
        dtype: what it is to give; None: any.
    """
    if isinstance(made, T) and dtype not in (None, made.dtype):
        raise ConfigError(f"{what} gave a tensor of {made.dtype}; it must give {dtype}")
    if isinstance(made, T) and (shape is None or tuple(made.shape) == tuple(shape)):
        return made
    told = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, T) else f"a {type(made).__name__}"
    wanted = "" if shape is None else f" of shape {tuple(shape)}"
    raise ConfigError(f"{what} gave {told}; it must give a tensor{wanted}")


def k1(log_probs: T, ref_log_probs: T) -> T:
    """log p - log q: unbiased, may be negative. Its gradient as a loss has expectation 0."""
    return log_probs - ref_log_probs


def k2(log_probs: T, ref_log_probs: T) -> T:
    """(log p - log q)^2 / 2: biased, low variance; as a loss on-policy its gradient is that of the KL."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: T, ref_log_probs: T) -> T:
    """q/p - 1 - log(q/p): unbiased and never negative; log(q/p) is clamped from above at K3_MAX_LOG_RATIO.

    `k3_unbiased` is the same; the KL loss weighs it by policy / old policy (DeepSeek-V3.2, arXiv 2512.02556). So its
    gradient is that of KL(policy || reference) for tokens of an older policy too.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=K3_MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def compute_approx_kl(log_probs: T, ref_log_probs: T, kind: str = "k1") -> T:
    """Estimate of KL(policy || reference) at each sampled token, (B, A) float32.

    Args:
        log_probs: (B, A) of the policy; they may carry gradients.
        ref_log_probs: (B, A) of the reference.
        kind: a name of the registry (http://joschu.net/blog/kl-approx.html).
    """
    made = registry.kl_estimators[kind].load()(log_probs.float(), ref_log_probs.float())
    return of_shape(made, log_probs.shape, f"kl_estimator {kind}").float()


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """The coefficient does not depend on what was measured."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a `state_dict`."""
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """A coefficient steered so that the KL per token nears `target` (after Ziegler et al. 2019, arXiv 1909.08593)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Scale by 1 + clip(current / target - 1, +-0.2) * n_steps / horizon.

        current: mean KL per token of the step, the same on every rank; n_steps: samples of the step over all ranks.
        """
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(config: AlgorithmConfig) -> FixedKLController:
    """Adaptive when `kl_target` is set, else fixed at `init_kl_coef`."""
    if config.kl_target is None:
        return FixedKLController(config.init_kl_coef)
    return AdaptiveKLController(config.init_kl_coef, config.kl_target, config.kl_horizon)


def compute_reward(
    r: T, kl_coef: float, kl: T | None, action_mask: T, reward_clip_range: tuple[float, float] | None = None
) -> T:
    """Reward of each action token (B, A): the sample's reward r (B) at its last real token, minus kl_coef * kl.

    Args:
        r: (B).
        kl_coef: weight of the KL.
        kl: (B, A) or None.
        action_mask: (B, A) bool. A row without any action token gets zeros; masked positions are 0 whatever kl holds.
        reward_clip_range: lowest and highest r, to which it is clamped first.
    """
    mask = action_mask.bool()
    if r.shape != mask.shape[:1]:
        raise ValueError(f"rewards {tuple(r.shape)} do not belong to an action mask of {tuple(mask.shape)}")
    if reward_clip_range is not None:
        r = r.clamp(*reward_clip_range)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True) if mask.shape[1] else positions
    rewards = torch.where(positions == last, r.float().unsqueeze(1), 0.0)
    if kl is None or kl_coef == 0:
        return rewards
    return rewards - torch.where(mask, kl_coef * kl.float(), 0.0)
