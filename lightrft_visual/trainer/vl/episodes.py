"""From a configuration to the stage that holds episodes of several turns."""

from dataclasses import replace
from functools import partial
from typing import Any

from ...config import registry
from ...config.vl import RunConfig
from ...errors import ConfigError
from ...models.loading import Checkpoint
from ...rollout.conversation import ObservationRenderer
from ...rollout.engine import RolloutStage
from ...rollout.environment_pool import ProcessHost, runs_apart
from ...rollout.environment_threads import ThreadHost
from ...rollout.environments import EnvironmentHost, environment_factory
from ...rollout.episodes import EpisodeLimits, EpisodeStage
from ...rollout.multimodal import MultimodalDataProcessor
from ...rollout.tools import parse_tool_calls, tool_call_format
from ...runtime.usercode.calls import what_happened


def with_tools(config: RunConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the schemas of the environment's tools. Raises ConfigError for an environment that cannot be
    made, and for a chat template that episodes cannot use."""
    if not config.episodes.used:
        return checkpoint
    if checkpoint.family.draws:
        raise ConfigError(
            "environments answer responses in text, and this model draws: leave environment and tools out"
        )
    checkpoint = replace(checkpoint, tools=schemas_of(environment_factory(config.episodes)()))
    _renderer(config, checkpoint, MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 1))
    return checkpoint


def schemas_of(environment: Any) -> tuple[dict[str, Any], ...]:
    """Those of its tools. Raises ConfigError for what is no list of them."""
    try:
        schemas = tuple(environment.schemas()) if hasattr(environment, "schemas") else ()
        if all(isinstance(each.get("function", each)["name"], str) for each in schemas):
            return schemas
        told = "gave a name that is no text"
    except ConfigError:
        raise
    except Exception as error:
        told = what_happened(error)
    raise ConfigError(
        f"environment {type(environment).__name__}: `schemas()` must return a list of JSON schemas of tools, "
        f"each with its name; reading them {told}"
    )


def _renderer(config: RunConfig, checkpoint: Checkpoint, data: MultimodalDataProcessor) -> ObservationRenderer:
    """What makes tokens of observations, by a checkpoint with the schemas of tools. Raises ConfigError as it does."""
    rollout, tools = config.rollout, list(checkpoint.tools)
    return ObservationRenderer(
        data,
        checkpoint.tokenizer.convert_ids_to_tokens(checkpoint.eos_ids),
        config.episodes.observation_max_tokens,
        {"images": rollout.limit_mm_image_per_prompt, "videos": rollout.limit_mm_video_per_prompt},
        ("user", "tool") if tools else ("user",),
        tools,
    )


def data_processor(config: RunConfig, checkpoint: Checkpoint) -> MultimodalDataProcessor:
    """What makes tokens and patches of the run's prompts."""
    return MultimodalDataProcessor(
        checkpoint.tokenizer,
        checkpoint.processor,
        config.rollout.prompt_max_len,
        allow_remote=config.data.allow_remote_media,
        max_image_pixels=config.data.max_image_pixels,
    )


def episode_stage(config: RunConfig, checkpoint: Checkpoint) -> Any:
    """What makes the rollout stage of an engine, a data processor and a seed; a plain one without an environment."""
    if not config.episodes.used:
        return RolloutStage
    split = config.distributed.split
    return registry.services.load("placement").episodes() if split else own_episodes(config, checkpoint)


def own_episodes(config: RunConfig, checkpoint: Checkpoint) -> Any:
    """The same of a process that holds the episodes itself."""
    episodes = config.episodes
    host: EnvironmentHost
    if runs_apart(episodes):
        host = ProcessHost(episodes)
    else:  # an object of this program, which another process cannot load
        host = ThreadHost(environment_factory(episodes, for_episodes=True), episodes.env_timeout)
    limits = EpisodeLimits(
        episodes.max_turns,
        config.response_max_len,
        episodes.on_environment_error,
        episodes.turn_gamma,
        episodes.max_environments,
    )
    template = (checkpoint.processor or checkpoint.tokenizer).chat_template
    form, tools = tool_call_format(str(template)), checkpoint.tools
    parse = partial(parse_tool_calls, form=form, tools=tools) if tools else None

    def stage(engine: Any, data: MultimodalDataProcessor, run_seed: int) -> EpisodeStage:
        renderer = _renderer(config, checkpoint, data)
        return EpisodeStage(engine, data, run_seed, host, renderer, limits, parse)

    return stage


def with_environment_reward(config: RunConfig) -> RunConfig:
    """The configuration itself, or where it names an environment and no reward, with that of the environment."""
    named = config.episodes.environment is not None and not config.reward.given
    own = config.data.prompt_data in registry.tasks and registry.tasks[config.data.prompt_data].reward is not None
    if not named or own:
        return config
    return replace(config, reward=replace(config.reward, components={"environment": 1.0}))
