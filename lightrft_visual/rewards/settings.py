"""From a `RewardConfig` to an engine's arguments; everything that can be wrong is found before a model loads."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ..config.shared import RewardConfig
from ..errors import ConfigError, did_you_mean
from .local.callables import Signature, callable_name, check_inputs, load_reward_fn
from .recipe import Recipe, RecipeEntry, compose_recipe, load_recipe
from .registry import check_scorer
from .remote.client import check_url
from .scorers import named_entries


def engine_arguments(
    config: RewardConfig, labels: Iterable[str | None] = (), columns: Collection[str] | None = None
) -> dict[str, Any]:
    """Keyword arguments of RewardComputationEngine. Raises ConfigError as `check_reward_config` does, and with the
    columns of the data for a function that asks for one that is not there.
    """
    function = load_reward_fn(config.reward_fn) if config.reward_fn else None
    recipe = load_recipe(config.reward_recipe) if config.reward_recipe else None
    recipe = compose_recipe(recipe, config.components, config.kwargs)
    check_parts(config, function, recipe)
    _check_functions(config, function, recipe, columns)
    if recipe is not None:
        recipe.check_labels(labels)
    return {
        "reward_model": config.reward_pretrain,
        "remote_rm_url": config.remote_rm_url,
        "reward_fn": function,
        "reward_recipe": recipe,
    }


def check_reward_config(config: RewardConfig, labels: Iterable[str | None] = ()) -> None:
    """Raise ConfigError for a missing file or function, a bad URL, an unknown rule, label or model name, or a token
    variable that is not set. Loads no model and opens no connection."""
    engine_arguments(config, labels)


def check_parts(config: RewardConfig, function: Any, recipe: Recipe | None) -> None:
    if config.reward_token_env and not os.environ.get(config.reward_token_env):
        raise ConfigError(f"reward_token_env names {config.reward_token_env}, which is not set")
    if function is not None and recipe is not None:
        if "model_reward_list" in Signature(function, callable_name(function)).names:
            raise ConfigError("reward_fn with model_reward_list aggregates by hand; it excludes reward_recipe")
    remotes = named_entries(config.remote_rm_url)
    for entry in remotes.values():
        check_remote(entry)
    models = named_entries(config.reward_pretrain)
    functions = [] if function is None else [callable_name(function)]
    keys = [entry.key for entry in recipe.components()] if recipe else functions
    if any(name not in keys for name in functions):
        raise ConfigError(f"the reward recipe does not use reward_fn; name it there as [func, {functions[0]}, weight]")
    for entry in recipe.components() if recipe else ():
        _check_entry(entry, list(models), list(remotes), functions)


def _check_functions(
    config: RewardConfig, function: Any, recipe: Recipe | None, columns: Collection[str] | None
) -> None:
    if function is not None:
        check_inputs(function, callable_name(function), {}, columns)
    for entry in named_entries(config.remote_rm_url).values():
        if entry.endswith(".py"):
            check_inputs(load_reward_fn(f"{entry}:reward_func"), Path(entry).name, {}, columns)
    for entry in recipe.components() if recipe else ():
        if entry.type == "func" and ".py:" in entry.key:
            check_inputs(load_reward_fn(entry.key), entry.key, entry.kwargs, columns)


def check_remote(entry: str) -> None:
    if entry.endswith(".py"):
        load_reward_fn(f"{entry}:reward_func")
    else:
        for url in entry.split("|"):
            check_url(url.strip())


def _check_entry(entry: RecipeEntry, models: list[str], remotes: list[str], functions: list[str]) -> None:
    if entry.type == "func" and ".py:" in entry.key:
        if not Path(entry.key.rpartition(":")[0]).expanduser().is_file():
            raise ConfigError(f"the reward recipe names {entry.key}, which does not exist")
        load_reward_fn(entry.key)
    elif entry.type in ("rule", "func"):
        if entry.type == "func" and entry.key in functions:
            return
        check_scorer(entry.key, entry.kwargs)
    elif entry.type == "remote" and "://" in entry.key:
        check_remote(entry.key)
    else:
        known = models if entry.type == "model" else remotes
        aliases = [*known, *(f"{entry.type}{n}" for n in known if n.isdigit()), *map(str, range(len(known)))]
        if len(models) == 1:
            aliases.append("model")
        if entry.key not in aliases:
            raise ConfigError(f"the reward recipe names the {entry.type} {entry.key!r}{did_you_mean(entry.key, known)}")
