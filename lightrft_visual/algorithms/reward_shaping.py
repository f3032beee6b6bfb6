"""What happens to a sample's reward before advantages: overlong penalty, running normalisation, clip, KL per token."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..strategy.collectives import all_reduce_sum

T = torch.Tensor


def overlong_penalty(lengths: T, max_new_tokens: int, buffer_len: int, factor: float) -> T:
    """Soft length penalty of DAPO (arXiv 2503.14476): (B), 0 down to -factor over the last `buffer_len` tokens.

    lengths (B): response tokens. clamp(-(length - (max_new_tokens - buffer_len)) / buffer_len * factor, max=0).
    """
    excess = lengths.float() - (max_new_tokens - buffer_len)
    return (-excess / buffer_len * factor).clamp(max=0.0)


class RunningMoments:
    """Running mean and variance of a stream of rewards over all ranks (parallel update of Chan et al.)."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Standard deviation with n - 1; 1 while it is not defined or zero, so that dividing changes nothing."""
        if self.count < 2 or self.squares <= 0:
            return 1.0
        return math.sqrt(self.squares / (self.count - 1))

    def update(self, values: T) -> None:
        """Take in this rank's values (n), n >= 0. A collective: every rank must call it."""
        values = values.float()
        totals = all_reduce_sum(torch.stack([values.new_tensor(float(values.numel())), values.sum()]))
        count, total = totals.tolist()
        if count == 0:
            return
        mean = total / count
        squares = all_reduce_sum((values - mean).square().sum()).item()
        delta = mean - self.mean
        merged = self.count + count
        self.squares += squares + delta * delta * self.count * count / merged
        self.mean += delta * count / merged
        self.count = merged

    def normalize(self, values: T, minus_mean: bool) -> T:
        """values / std, with `minus_mean` (values - mean) / std."""
        return (values - (self.mean if minus_mean else 0.0)) / self.std

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.squares = (float(state[key]) for key in ("count", "mean", "squares"))


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
