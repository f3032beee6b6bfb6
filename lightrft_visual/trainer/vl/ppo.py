"""PPO (arXiv 1707.06347) with a critic on the vision-language backbone and generalised advantage estimation."""

from __future__ import annotations

from .trainer import VLTrainer


class PPOTrainer(VLTrainer):
    """PPO: advantages from a critic that is trained beside the actor, values clipped."""

    estimators = ("gae",)
