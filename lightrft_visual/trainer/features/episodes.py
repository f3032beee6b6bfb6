"""Episodes in the metrics: turns, tokens of observations, calls of tools, failures of environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ...experience.rollouts import Episode
from ...observe.metrics import MetricsAccumulator
from ...rollout.environments import EnvironmentHost
from ..hooks import StepData, StepHook


class EpisodesHook(StepHook):
    """Adds to each step's metrics what its episodes did. host: is closed with the run."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host

    def on_experience(self, step: StepData) -> StepData:
        """Means over episodes, totals of calls and failures."""
        add_episode_metrics(step.metrics, [each.episode for each in step.rollouts if each.episode is not None])
        return step

    def close(self) -> None:
        """Environments end with the run."""
        self.host.close()


def add_episode_metrics(metrics: MetricsAccumulator, episodes: Sequence[Episode]) -> None:
    """`turns` (mean), `observation_tokens_share` (of all tokens behind prompts), `environment_errors`, `tool_errors`
    and `tool_calls/NAME` (totals), of this rank's episodes."""
    calls = [call for episode in episodes for turn in episode.turns for call in turn.calls]
    metrics.add_mean("turns", torch.tensor([float(len(episode.turns)) for episode in episodes]))
    tokens = torch.tensor([float(turn < 0) for episode in episodes for turn in episode.turn_ids])
    metrics.add_mean("observation_tokens_share", tokens)
    metrics.add_total("environment_errors", sum(episode.failure is not None for episode in episodes))
    metrics.add_total("tool_errors", sum(error is not None for _, error in calls))
    for name, count in Counter(name for name, _ in calls if name).items():
        metrics.add_total(f"tool_calls/{name}", count)


def build(parts: Any) -> EpisodesHook | None:
    """Where the run names an environment or tools."""
    return EpisodesHook(parts.maker.rollout_stage.host) if parts.config.episodes.used else None
