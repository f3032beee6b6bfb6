"""Trainers, experience, replay buffer, losses. Names are imported at first use; the trainers are those of the package
itself, which compose the loops of this room."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "GRPOTrainer": "..api",
    "RLOOTrainer": "..api",
    "PPOTrainer": "..api",
    "FastExperienceMaker": ".fast_exp_maker",
    "NaiveReplayBuffer": ".replay_buffer",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
