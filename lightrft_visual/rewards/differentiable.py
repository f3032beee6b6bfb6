"""Rewards with a gradient in the pixels, for Reward FL, by name or from a user's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError, RewardError
from .callables import load_reward_fn
from .functions.shape_match import shape_match
from .naming import nearest

T = torch.Tensor
# (media (B, 3, H, W) or (B, 3, T, H, W) in about 0..1 with gradient, prompts, metadata) -> scores (B), valid (B) bool
PixelReward = Callable[[T, list[str], list[dict[str, Any]]], tuple[T, T]]


def embedded_shape_match(media: T, prompts: list[str], metadata: list[dict[str, Any]]) -> tuple[T, T]:
    """The embedded task's measure; a caption without a known colour and shape is invalid."""
    found = shape_match(media, prompts)
    return found["score"], found["valid"]


DIFFERENTIABLE_REWARDS: dict[str, PixelReward] = {"shape_match": embedded_shape_match}


def load_differentiable(name: str) -> PixelReward:
    """A name of DIFFERENTIABLE_REWARDS, or `path.py:function`. Raises ConfigError, with the nearest name."""
    if ".py:" in name:
        return load_reward_fn(name)
    if name not in DIFFERENTIABLE_REWARDS:
        raise ConfigError(f"unknown differentiable_reward {name!r}{nearest(name, DIFFERENTIABLE_REWARDS)}")
    return DIFFERENTIABLE_REWARDS[name]


def check_scores(scores: T, valid: T, count: int, name: str) -> None:
    """Raise RewardError unless there is one finite score for each valid sample, with a gradient."""
    if scores.shape != (count,) or valid.shape != (count,):
        raise RewardError(f"{name}: {tuple(scores.shape)} scores and {tuple(valid.shape)} marks for {count} samples")
    if not bool(torch.isfinite(scores.detach()[valid]).all()):
        raise RewardError(f"{name}: a score that is marked valid is not finite")
    if bool(valid.any()) and not scores.requires_grad:
        raise RewardError(f"{name}: its scores carry no gradient, so there is nothing to learn from")
