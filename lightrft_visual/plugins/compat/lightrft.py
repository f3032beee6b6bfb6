"""Experience makers that are built and called as LightRFT's trainers do: its strategy's settings, its arguments."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ...config.vl import AlgorithmConfig
from ...errors import ConfigError
from ...experience.rollouts import SamplingSettings
from ...trainer.hooks import Hooks, StepHook
from ...trainer.vl.maker import MakerSettings

log = logging.getLogger(__name__)
FROM_ARGS = ("reward_running_norm", "use_kl_loss", "kl_estimator")  # it reads these in strategy.args, others in config
MASKED_ESTIMATORS = ("group_norm", "grpo")  # of which dynamic_sampling leaves groups out
FIRST_TEMPERATURE = 10.0
GENERATION = ("do_sample", "max_length", "pad_token_id", "eos_token_id")


class EqualGroupsHook(StepHook):
    """LightRFT's `dynamic_sampling`: groups whose rewards are all 0 or all 1 teach nothing; none is drawn anew."""

    def on_scores(self, rollouts: Any) -> Any:
        """Their samples count in no denominator."""
        rewards: dict[int, set[float]] = {}
        for each in rollouts:
            rewards.setdefault(each.prompt.group_id, set()).add(each.reward)
        equal = {group for group, found in rewards.items() if found in ({0.0}, {1.0})}
        rollouts.leave_out(torch.tensor([each.prompt.group_id in equal for each in rollouts]))
        return rollouts


def maker_settings(strategy: Any) -> MakerSettings:
    """What `strategy.args` and `strategy.config` say of makers; what neither has, or is None there, has our default.

    Raises ConfigError for an inference engine of another system.
    """

    def read(name: str, default: Any = None) -> Any:
        order = ("args", "config") if name in FROM_ARGS else ("config", "args")
        found = [getattr(getattr(strategy, each, None), name, None) for each in order]
        return next((value for value in found if value is not None), default)

    given = {each.name: read(each.name) for each in fields(AlgorithmConfig)}
    algorithm = AlgorithmConfig(**{name: value for name, value in given.items() if value is not None})
    settings = MakerSettings(algorithm=algorithm, run_seed=read("seed", 42), engine=_engine(strategy))
    settings.micro_batch_size = read("micro_rollout_batch_size", settings.micro_batch_size)
    first = read("first_token_temperature", FIRST_TEMPERATURE) if read("use_fire") else None
    settings.sampling = SamplingSettings(n=read("n_samples_per_prompt", 1), first_token_temperature=first)
    if read("dynamic_sampling") and algorithm.advantage_estimator in MASKED_ESTIMATORS:
        settings.hooks = Hooks([EqualGroupsHook()])
    elif read("dynamic_sampling"):
        log.warning("dynamic_sampling is of %s, and nothing is left out here", " and ".join(MASKED_ESTIMATORS))
    return settings


def _engine(strategy: Any) -> Any:
    engine = getattr(strategy, "inference_engine", None)
    if engine is None or hasattr(engine, "wake") or hasattr(engine, "experience_maker"):
        return engine
    raise ConfigError(
        f"strategy.inference_engine is a {type(engine).__name__}; give an engine of lightrft_visual.rollout, or None "
        "for the transformers engine around the actor"
    )


def sampling_arguments(arguments: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Generation arguments as the maker knows them, of those that LightRFT's trainers hand on.

    do_sample False draws the likeliest tokens; max_length gives way to max_new_tokens, as in transformers. Raises
    ConfigError for a max_length alone, which counts the prompt too, and for ids that are not the tokenizer's.
    """
    kept = {name: value for name, value in arguments.items() if name not in GENERATION}
    if kept.get("max_new_tokens", 0) is None:  # as transformers has it where it is not given
        del kept["max_new_tokens"]
    if arguments.get("do_sample") is False:
        kept["temperature"] = 0.0
    if arguments.get("max_length") is not None and "max_new_tokens" not in kept:
        raise ConfigError("max_length counts the prompt too: write max_new_tokens, and prompt_max_len for prompts")
    for name in ("pad_token_id", "eos_token_id"):
        value, own = arguments.get(name), getattr(tokenizer, name, None)
        if value is not None and own not in (value if isinstance(value, (list, tuple)) else [value]):
            raise ConfigError(f"{name} is {value}, the tokenizer's is {own}: set it on the tokenizer")
    return kept
