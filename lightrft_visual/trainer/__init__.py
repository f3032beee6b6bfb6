"""Trainers, experience, replay buffer, losses. The trainers are imported at first use: they bring the engines along."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "GRPOTrainer": "vl.trainer",
    "RLOOTrainer": "vl.trainer",
    "PPOTrainer": "vl.trainer",
    "FastExperienceMaker": "fast_exp_maker",
    "NaiveReplayBuffer": "replay_buffer",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
