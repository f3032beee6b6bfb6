"""Episodes in the metrics: turns, tokens of observations, calls of tools, failures of environments."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ...config.shared import REWARDS
from ...errors import RolloutError
from ...experience.rollouts import ENVIRONMENT, Episode, Rollouts, Turn
from ...observe.metrics import MetricsAccumulator
from ...rollout.environments import EnvironmentHost
from ...runtime import collectives
from ...runtime.usercode.calls import masked
from ..hooks import StepData, StepHook

log = logging.getLogger(__name__)
SHOWN_FAILURES = 3
NO_REWARD = (
    "no episode of this step got a reward from its environment, and the run has no other: if it gives none, name one "
    "by reward_fn or reward.components (a class of TRL has `get_reward` or `reward`)"
)


class EpisodesHook(StepHook):
    """Adds to each step's metrics what its episodes did, and ends a run most of whose episodes teach nothing.

    host: is closed with the run; None where workers have it. most_failures: share of a step's episodes, over all ranks,
    that failures may mask; above it the run ends. only_reward: the run has no other reward than the environment's; a
    first step without any is told.
    """

    def __init__(self, host: EnvironmentHost | None, most_failures: float, only_reward: bool = False) -> None:
        self.host, self.most_failures, self._awaits_reward = host, most_failures, only_reward
        self._tools_told = False

    def on_rollouts(self, rollouts: Rollouts) -> Rollouts:
        """Says what failed. A collective. Raises RolloutError, on all ranks alike."""
        collectives.meet()  # one rank's environments may take minutes longer than another's
        episodes = [r.episode for r in rollouts if r.episode is not None]
        failures = [each.failure for each in episodes if each.failure is not None]
        counted = Counter(map(_in_one_line, failures)).most_common(SHOWN_FAILURES)
        told = "; ".join(f"{text} ({count} of {len(rollouts)} episodes)" for text, count in counted)
        if told:
            log.warning("environments failed: %s", told)
        limits = [each.reason for each in episodes if each.failed and each.failure is None]
        for reason, count in Counter(limits).items():
            log.warning("%d of %d episodes are invalid: %s", count, len(rollouts), reason)
        self._say_tools([turn for each in episodes for turn in each.turns])
        lost = sum(each.failed and each.failure is not None for each in episodes)
        ended = sum(not each.failed and each.limit is None for each in episodes)
        counts = [lost, len(rollouts), ended, sum(each.rewarded for each in episodes)]
        failed, total, over, rewarded = collectives.all_reduce_sum(torch.tensor(counts, dtype=torch.float32)).tolist()
        if failed > self.most_failures * total:
            why = told or "see another rank"
            raise RolloutError(f"{failed:.0f} of {total:.0f} environments failed (reward_max_invalid): {why}")
        if self._awaits_reward and over and not rewarded and collectives.is_rank_0():
            log.warning(NO_REWARD)
        self._awaits_reward = self._awaits_reward and not over
        return rollouts

    def _say_tools(self, turns: Sequence[Turn]) -> None:
        """Once a run, where most calls of a step fail: the most frequent reason."""
        made, failed = sum(len(turn.calls) for turn in turns), sum(map(_tool_errors, turns))
        if self._tools_told or 2 * failed <= made:
            return
        self._tools_told = True
        own = [turn.info["tool_error"] for turn in turns if isinstance(turn.info.get("tool_error"), str)]
        reasons = own or [error for turn in turns for _, error in turn.calls if error is not None]
        told = "".join(f"; most often: {masked(text)}" for text, _ in Counter(reasons).most_common(1))
        log.warning("%d of %d calls of tools failed in a step%s (said once)", failed, made, told)

    def on_experience(self, step: StepData) -> StepData:
        """Means over episodes, totals of calls and failures."""
        add_episode_metrics(step.metrics, [each.episode for each in step.rollouts if each.episode is not None])
        return step

    def close(self) -> None:
        """Environments end with the run."""
        if self.host is not None:
            self.host.close()


def add_episode_metrics(metrics: MetricsAccumulator, episodes: Sequence[Episode]) -> None:
    """`turns` (mean), `observation_tokens_share` (of all tokens behind prompts), `environment_errors`, `tool_errors`
    and `tool_calls/NAME` (totals), of this rank's episodes."""
    turns = [turn for episode in episodes for turn in episode.turns]
    metrics.add_mean("turns", torch.tensor([float(len(episode.turns)) for episode in episodes]))
    tokens = torch.tensor([float(turn < 0) for episode in episodes for turn in episode.turn_ids])
    metrics.add_mean("observation_tokens_share", tokens)
    metrics.add_total("environment_errors", sum(episode.failure is not None for episode in episodes))
    metrics.add_total("tool_errors", sum(map(_tool_errors, turns)))
    made = Counter(name for turn in turns for name, error in turn.calls if error is None)  # of tools that there are
    for name, count in made.items():
        metrics.add_total(f"tool_calls/{name}", count)


def _in_one_line(failure: str) -> str:
    """What happened, and the innermost line of the user's own files, without what it was raised from."""
    first, *lines = failure.partition("\n  after it ")[0].split("\n")
    return ", ".join([first, *[line.strip() for line in lines if line.startswith("  File ")][-1:]])


def _tool_errors(turn: Turn) -> int:
    """Calls that could not be made, and those of tools that failed, which the environment alone knows."""
    told = turn.info.get("tool_errors")
    known = min(told, 10**6) if isinstance(told, int) else 0  # a metric holds no larger ones
    return max(sum(error is not None for _, error in turn.calls), known)


def build(parts: Any) -> EpisodesHook | None:
    """Where the run names an environment or tools."""
    config, reward = parts.config, parts.config.reward
    if not config.episodes.used:
        return None
    named = [name for name in REWARDS if getattr(reward, name)]
    alone = named == ["components"] and [*reward.components] == [ENVIRONMENT]
    return EpisodesHook(parts.maker.rollout_stage.host, reward.reward_max_invalid, alone)
