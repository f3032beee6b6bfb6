"""PPO (arXiv 1707.06347) with a critic on the vision-language backbone and generalised advantage estimation."""

from __future__ import annotations

from ..errors import ConfigError
from .vl_trainer import VLParts, VLTrainer


class PPOTrainer(VLTrainer):
    """PPO; needs a critic. Raises ConfigError without one."""

    estimator = "gae"

    def __init__(self, parts: VLParts):
        if parts.critic is None:
            raise ConfigError("PPOTrainer needs a critic: set advantage_estimator gae")
        super().__init__(parts)
