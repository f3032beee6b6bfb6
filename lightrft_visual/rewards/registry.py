"""Scorers by name, from config/registry.py: built-in ones, imported on first use, and those a user registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..config import registry
from ..errors import ConfigError, did_you_mean

OTHER_NAMES = {"model_name": "model", "model_path": "model"}  # of a scorer's settings in VRL


def register_scorer(name: str, about: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a function or class known to recipes as `name`.

    A class is built with the recipe's keyword settings and its instances are called; a function is called itself, its
    settings bound by keyword. Raises ConfigError when the name is taken by something else.
    """
    return registry.scorers.register(name, about)


def scorer_names() -> list[str]:
    """All names, sorted."""
    return sorted(registry.scorers.names())


def find_scorer(name: str) -> Callable[..., Any]:
    """The class or function behind a name. Raises ConfigError with the nearest name when there is none."""
    return registry.scorers.load(name)


def check_scorer(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError when the name is unknown or takes no such setting; builds nothing."""
    target = find_scorer(name)
    parameters = inspect.signature(target).parameters
    settings = own_settings(target, settings)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in settings:
        if key not in parameters:
            raise ConfigError(f"scorer {name!r} has no setting {key!r}{did_you_mean(key, parameters)}")


def own_settings(target: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that the scorer has for them: what other systems call `model_name` may be `model`."""
    parameters = inspect.signature(target).parameters
    renamed = {there: here for there, here in OTHER_NAMES.items() if here in parameters and there not in parameters}
    return {renamed.get(key, key): value for key, value in settings.items()}


def build_scorer(name: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A ready callable: a class instance, or the function with its settings bound.

    Raises ConfigError for an unknown name or setting, and when a scorer lacks a package, program or checkpoint.
    """
    settings = dict(settings or {})
    check_scorer(name, settings)
    target = find_scorer(name)
    settings = own_settings(target, settings)
    parameters = inspect.signature(target).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [key for key in needed if key not in settings] if inspect.isclass(target) else []
    if missing:
        raise ConfigError(f"scorer {name!r} needs the setting {missing[0]!r}")
    return instantiate(target, settings)


def instantiate(target: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """A class built with its settings, or a function with them bound."""
    if inspect.isclass(target):
        return target(**settings)
    return partial(target, **settings) if settings else target
