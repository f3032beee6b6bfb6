"""KL divergence to the reference policy from log-probs of sampled tokens, and controllers of its weight."""

from __future__ import annotations

import torch

from ..config import registry
from ..config.vl import AlgorithmConfig

T = torch.Tensor

# exp of the k3 estimator's argument is cut here: a token that the policy finds e^10 times less likely than the
# reference gives 2.2e4, not infinity. Only that side grows exponentially; the other is linear and stays as it is.
K3_MAX_LOG_RATIO = 10.0


def k1(log_probs: T, ref_log_probs: T) -> T:
    """log p - log q: unbiased, may be negative. Its gradient as a loss has expectation 0."""
    return log_probs - ref_log_probs


def k2(log_probs: T, ref_log_probs: T) -> T:
    """(log p - log q)^2 / 2: biased, low variance; as a loss on-policy its gradient is that of the KL."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: T, ref_log_probs: T) -> T:
    """q/p - 1 - log(q/p): unbiased and never negative; log(q/p) is clamped from above at K3_MAX_LOG_RATIO."""
    log_ratio = (ref_log_probs - log_probs).clamp(max=K3_MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def compute_approx_kl(log_probs: T, ref_log_probs: T, kind: str = "k1") -> T:
    """Estimate of KL(policy || reference) at each sampled token, (B, A) float32.

    `kind` is a name of the registry (http://joschu.net/blog/kl-approx.html). log_probs may carry gradients.
    """
    return registry.kl_estimators.load(kind)(log_probs.float(), ref_log_probs.float())


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
