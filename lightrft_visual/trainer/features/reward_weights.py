"""Weights of rewards that a watched file gives: read before each step, and shown in its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..hooks import StepHook


class RewardWeightsHook(StepHook):
    """Reads the watched file at the start of each step. rewards: the run's reward engine."""

    def __init__(self, rewards: Any) -> None:
        self.rewards = rewards
        self.weights: dict[str, float] = {}
        self.read_at = -1  # the step; one that asks for prompts again is scored by the same weights

    def on_prompts(self, requests: Any) -> Any:
        """A collective: all ranks take over what rank 0 reads."""
        if self.read_at != self.context.step():
            self.weights, self.read_at = self.rewards.refresh_weights(), self.context.step()
        return requests

    def metrics(self) -> Mapping[str, float]:
        """`reward_weight/<name>` of each reward."""
        return {f"reward_weight/{name}": weight for name, weight in self.weights.items()}


def build(parts: Any) -> RewardWeightsHook | None:
    """Where weights are watched."""
    rewards = parts.maker.rewards
    return RewardWeightsHook(rewards) if rewards.watches_weights else None
