"""RLOO (arXiv 2402.14740): leave-one-out baselines within each prompt's samples."""

from __future__ import annotations

from .trainer import VLTrainer


class RLOOTrainer(VLTrainer):
    """REINFORCE with a leave-one-out baseline."""

    estimators = ("rloo",)
