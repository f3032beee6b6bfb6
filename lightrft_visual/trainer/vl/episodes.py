"""From a configuration to the stage that holds episodes of several turns."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ...config import registry
from ...config.sft import SFTRunConfig
from ...config.vl import RunConfig
from ...errors import ConfigError
from ...models.loading import Checkpoint
from ...rollout.conversation import ObservationRenderer
from ...rollout.engine import RolloutStage
from ...rollout.environment_pool import ProcessHost, runs_apart
from ...rollout.environment_threads import ThreadHost
from ...rollout.environments import EnvironmentHost, awaited_value, environment_factory, is_reusable
from ...rollout.episodes import EpisodeStage
from ...rollout.multimodal import MultimodalDataProcessor
from ...rollout.tool_calls import parse_tool_calls, tool_call_format
from ...rollout.tools import ToolEnvironment
from ...runtime import collectives
from ...runtime.usercode.calls import what_happened

logger = logging.getLogger(__name__)


def with_tools(config: RunConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the schemas of the environment's tools. Raises ConfigError for an environment that cannot be
    made, and for a chat template that episodes cannot use."""
    if not config.episodes.used:
        return checkpoint
    if checkpoint.family.draws:
        raise ConfigError(
            "environments answer responses in text, and this model draws: leave environment and tools out"
        )
    environment: Any = environment_factory(config.episodes)()
    checkpoint = replace(checkpoint, tools=schemas_of(environment))
    if is_reusable(environment) and not (runs_apart(config.episodes) or config.distributed.split):
        checkpoint = replace(checkpoint, environment=environment)
    elif hasattr(environment, "close"):
        with suppress(Exception):  # whatever an environment does that was never reset
            awaited_value(environment.close())
    roles = [] if isinstance(environment, ToolEnvironment) else ["user"]
    roles += ["tool"] if checkpoint.tools else []
    _renderer(config, checkpoint, roles=roles)
    return checkpoint


def warn_of_template(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Say on the first rank what the chat template does not tell the model of its tools."""
    if not checkpoint.tools or not collectives.is_rank_0():
        return
    renderer = _renderer(config, checkpoint)
    told = config.data.system_prompt or ""
    hidden = [name for name in renderer.hidden_tools() if name not in told]
    if hidden:
        logger.warning(
            "the chat template does not show the model its tools (%s): describe them in the prompts or the "
            "system_prompt, or put a template that shows them into the model's folder, as chat_template.jinja",
            ", ".join(hidden),
        )
    taught, form = renderer.taught_call(), tool_call_format(_template(checkpoint))
    if taught and not any(call.arguments for call in parse_tool_calls(taught, form, checkpoint.tools)):
        form = "JSON objects" if form == "auto" else form
        logger.warning("calls of tools are read as %s, and the chat template teaches another form: %r", form, taught)


def _template(checkpoint: Checkpoint) -> str:
    return str((checkpoint.processor or checkpoint.tokenizer).chat_template)


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


def _renderer(
    config: RunConfig, checkpoint: Checkpoint, data: MultimodalDataProcessor | None = None, roles: Sequence[str] = ()
) -> ObservationRenderer:
    """What makes tokens of observations, by a checkpoint with the schemas of tools. Raises ConfigError as it does, for
    these roles at once."""
    rollout, tools = config.rollout, list(checkpoint.tools)
    return ObservationRenderer(
        data or MultimodalDataProcessor(checkpoint.tokenizer, checkpoint.processor, 1),
        checkpoint.tokenizer.convert_ids_to_tokens(checkpoint.eos_ids),
        config.episodes.observation_max_tokens,
        {"images": rollout.limit_mm_image_per_prompt, "videos": rollout.limit_mm_video_per_prompt},
        roles,
        tools,
        config.data.chat_template_kwargs,
    )


def data_processor(config: RunConfig | SFTRunConfig, checkpoint: Checkpoint) -> MultimodalDataProcessor:
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
    return registry.services.load("placement").RemoteEngine.episodes if split else own_episodes(config, checkpoint)


def own_episodes(config: RunConfig, checkpoint: Checkpoint) -> Any:
    """The same of a process that holds the episodes itself."""
    episodes = config.episodes
    host: EnvironmentHost
    if runs_apart(episodes):
        host = ProcessHost(episodes)
    else:  # an object of this program, which another process cannot load
        host = ThreadHost(environment_factory(episodes), episodes.env_timeout, checkpoint.environment)
    form, tools = tool_call_format(_template(checkpoint)), checkpoint.tools
    parse = partial(parse_tool_calls, form=form, tools=tools) if tools else None

    def stage(engine: Any, data: MultimodalDataProcessor, run_seed: int) -> EpisodeStage:
        renderer = _renderer(config, checkpoint, data)
        return EpisodeStage(engine, data, run_seed, host, renderer, episodes, config.response_max_len, parse)

    return stage


def with_environment_reward(config: RunConfig) -> RunConfig:
    """The configuration itself, or where it names an environment and has no reward, with that of the environment."""
    if config.episodes.environment is None or config.reward.given:
        return config
    return replace(config, reward=replace(config.reward, components={"environment": 1.0}))
