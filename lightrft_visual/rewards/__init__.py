"""Rewards: one engine over callables, rules, local models, remote servers and judges; see docs/rewards.md.

Names are imported on first use, so that light parts (a sandboxed callable, a rule) start without torch models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.usercode.loading import load_reward_fn
    from .batch import Failed, RewardBatch, RewardOutput
    from .engine import RewardComputationEngine
    from .recipe import Recipe, load_recipe, parse_recipe, recipe_from_components
    from .registry import build_scorer, register_scorer, scorer_names

_EXPORTS = {
    "RewardComputationEngine": "engine", "RewardBatch": "batch", "RewardOutput": "batch", "Failed": "batch",
    "Recipe": "recipe", "parse_recipe": "recipe", "load_recipe": "recipe", "recipe_from_components": "recipe",
    "register_scorer": "registry", "build_scorer": "registry", "scorer_names": "registry",
    "load_reward_fn": ".runtime.usercode.loading",
}  # fmt: skip
__all__ = [
    "Failed", "Recipe", "RewardBatch", "RewardComputationEngine", "RewardOutput", "build_scorer", "load_recipe",
    "load_reward_fn", "parse_recipe", "recipe_from_components", "register_scorer", "scorer_names",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
