"""GRPO (arXiv 2402.03300) and its relatives: group-relative advantages, no critic."""

from __future__ import annotations

from .vl_trainer import VLTrainer


class GRPOTrainer(VLTrainer):
    """Group-relative policy optimisation; `advantage_estimator` picks group_norm, dr_grpo, reinforce_baseline, …"""

    estimator = "group_norm"
