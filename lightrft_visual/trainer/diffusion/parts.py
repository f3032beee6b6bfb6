"""What a diffusion run is made of: `build` puts it together, the trainer works with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...algorithms.diffusion import Loss
from ...config.diffusion import DiffusionRunConfig
from ...config.registry import DiffusionAlgorithm
from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightCopy
from ...observe.rollouts import Record
from ...runtime.deepspeed import TrainEngine
from ..hooks import Hooks
from ..loop import LoopSettings
from .evaluation import DiffusionEvaluation
from .maker import DiffusionExperienceMaker, Drawn
from .pairs import PairExperience
from .prompts import DrawingSource
from .training_reward import TrainingReward
from .watching import DrawingWatched, records_of_drawn


@dataclass
class DiffusionParts:
    """Everything a diffusion run is made of; `build` puts it together from a configuration."""

    kind: ClassVar[str] = "diffusion"

    config: DiffusionRunConfig
    policy: DiffusionPolicy
    engine: TrainEngine
    algorithm: DiffusionAlgorithm
    loss: Loss
    maker: DiffusionExperienceMaker | PairExperience
    prompts: DrawingSource
    evaluation: DiffusionEvaluation | None
    loop: LoopSettings
    recorder: Any
    console: Any
    timer: Any
    hooks: Hooks
    old: WeightCopy | None = None
    trained_on: TrainingReward | None = None

    @property
    def has_gold(self) -> bool:
        """Whether a judge that training never sees is named."""
        return self.evaluation is not None and self.evaluation.gold is not None

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Of the policy."""
        return list(self.policy.trainable_parameters())

    def records_of(self, drawn: Any) -> list[Record]:
        """Of what a step drew; pairs of a file are nobody's drawings."""
        return records_of_drawn(drawn) if isinstance(drawn, Drawn) else []

    def watched(self) -> DrawingWatched:
        """What the guard looks at."""
        return DrawingWatched(self.evaluation.gold if self.evaluation is not None else None)
