"""GRPO (arXiv 2402.03300) and its relatives without a critic."""

from __future__ import annotations

from .trainer import VLTrainer


class GRPOTrainer(VLTrainer):
    """Group-relative policy optimisation, Dr. GRPO, REINFORCE with and without a baseline, CPGD."""

    estimators = ("group_norm", "grpo", "dr_grpo", "reinforce", "reinforce_baseline", "cpgd")
