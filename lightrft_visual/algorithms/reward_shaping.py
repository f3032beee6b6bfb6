"""What happens to a sample's reward before advantages: overlong penalty, running normalisation, clip, KL per token."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from ..observe.metrics import Moments

T = torch.Tensor


def overlong_penalty(lengths: T, max_new_tokens: int, buffer_len: int, factor: float) -> T:
    """Soft length penalty of DAPO (arXiv 2503.14476): (B), 0 down to -factor over the last `buffer_len` tokens.

    lengths (B): response tokens. clamp(-(length - (max_new_tokens - buffer_len)) / buffer_len * factor, max=0).
    """
    excess = lengths.float() - (max_new_tokens - buffer_len)
    return (-excess / buffer_len * factor).clamp(max=0.0)


class RunningMoments:
    """Mean and standard deviation of a stream of rewards over all ranks. seen: all that was taken in so far."""

    def __init__(self) -> None:
        self.seen = Moments()

    @property
    def std(self) -> float:
        """Standard deviation with n - 1; 1 while it is not defined or zero, so that dividing changes nothing."""
        return math.sqrt(self.seen.sample_variance) or 1.0

    def update(self, values: T) -> None:
        """Take in this rank's values (n), n >= 0. A collective: every rank must call it."""
        self.seen = self.seen.merge(Moments.over_ranks(values))

    def normalize(self, values: T, minus_mean: bool) -> T:
        """values / std, with `minus_mean` (values - mean) / std."""
        return (values - (self.seen.mean if minus_mean else 0.0)) / self.std

    def state_dict(self) -> dict[str, float]:
        """Count, mean and sum of squared deviations."""
        return asdict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.seen = Moments(**{name: float(value) for name, value in state.items()})


def compute_reward(
    r: T, kl_coef: float, kl: T | None, action_mask: T, reward_clip_range: tuple[float, float] | None = None
) -> T:
    """Reward of each action token (B, A): the sample's reward r (B) at its last real token, minus kl_coef * kl.

    kl (B, A) or None. reward_clip_range clamps r first. A row without any action token gets zeros. Masked positions
    are 0 whatever kl holds there.
    """
    mask = action_mask.bool()
    if r.shape != mask.shape[:1]:
        raise ValueError(f"rewards {tuple(r.shape)} do not belong to an action mask of {tuple(mask.shape)}")
    if reward_clip_range is not None:
        r = r.clamp(*reward_clip_range)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True) if mask.shape[1] else positions
    rewards = torch.where(mask & (positions == last), r.float().unsqueeze(1), 0.0)
    if kl is None or kl_coef == 0:
        return rewards
    return rewards - torch.where(mask, kl_coef * kl.float(), 0.0)
