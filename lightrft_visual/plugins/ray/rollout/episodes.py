"""Episodes of several turns with workers: the environments are where the engine is, and whole episodes come back.

    trainer: requests -> RemoteEngine -> worker: EpisodeStage(engine, environments) -> HeldEpisode -> rollouts

A worker takes over weights between two calls alone, so every token of an episode is of one policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....config.given_files import whole, with_whole_paths
from ....config.vl import RunConfig
from ....experience.rollouts import Completion, Episode, PromptFeatures, Rollout, SamplingSettings
from ....models.loading import Checkpoint
from ....rollout.engine import RolloutEngine, RolloutStage
from ....trainer.vl.episodes import data_processor, own_episodes, with_tools


@dataclass
class HeldEpisode(Completion):
    """An episode on its way to the trainer, its tokens those of all turns and observations."""

    episode: Episode = field(default_factory=Episode)

    @classmethod
    def of(cls, rollout: Rollout, asked: PromptFeatures) -> HeldEpisode:
        """What the trainer does not have of a rollout. asked: the prompt as it was sent."""
        changed = None if rollout.prompt is asked else rollout.prompt
        return cls(
            rollout.token_ids,
            rollout.log_probs,
            rollout.text,
            rollout.truncated,
            rollout.prompt.token_ids,
            experts=rollout.experts,
            episode=rollout.episode or Episode(),
            prompt=changed,
        )


class EpisodeEngine:
    """A worker's engine that is asked for episodes and holds them with environments of its own process.

    It is asked for single responses too, such as the parity gate's probes: by settings without `max_episode_tokens`.
    """

    def __init__(self, config: RunConfig, checkpoint: Checkpoint, engine: RolloutEngine) -> None:
        checkpoint = with_tools(config, checkpoint)
        self.engine = engine
        stage = own_episodes(config, checkpoint)
        self.stage = stage(engine, data_processor(config, checkpoint), config.train.seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompts: Sequence[PromptFeatures], settings: SamplingSettings) -> list[list[Completion]]:
        """n completions a prompt, in order. Raises as `EpisodeStage.draw`."""
        if settings.max_episode_tokens is None:
            return self.engine.generate(prompts, settings)
        rollouts, n = self.stage.draw(list(prompts), settings), settings.n
        return [
            [HeldEpisode.of(each, prompt) for each in rollouts[index * n : (index + 1) * n]]
            for index, prompt in enumerate(prompts)
        ]


class RemoteEpisodes(RolloutStage):
    """A `RolloutStage` of the trainer whose responses are episodes that workers hold. host: it has none of its own."""

    host = None

    def _rollouts(
        self, prompt: PromptFeatures, responses: list[Completion], first: int, policy_version: int, distorted: bool
    ) -> list[Rollout]:
        """As in the base. Versions of tokens are told of sampled ones alone; -1 stands for those of observations."""
        made: list[Rollout] = []
        for number, response in enumerate(responses, first):
            if not isinstance(response, HeldEpisode):
                made += super()._rollouts(prompt, [response], number, policy_version, distorted)
                continue
            own, episode = response.prompt or prompt, response.episode
            (rollout,) = super()._rollouts(own, [response], number, policy_version, distorted)
            if rollout.versions is not None:
                told = zip(rollout.versions, episode.turn_ids, strict=True)
                rollout.versions = [version if turn >= 0 else -1 for version, turn in told]
            made.append(replace(rollout, episode=episode, valid=not episode.failed))
        return made


def for_workers(config: RunConfig) -> RunConfig:
    """The configuration as workers read it: with the whole paths of model, plug-ins, environments and tools."""
    own = config.episodes
    environment, tools = map(with_whole_paths, (own.environment, own.tools))
    model = config.model.changed(pretrain=whole(config.model.pretrain))
    episodes, plugins = own.changed(environment=environment, tools=tools), with_whole_paths(config.plugins)
    return config.changed(model=model, episodes=episodes, plugins=plugins)
