"""What a diffusion run is made of: `build` puts it together, the trainer works with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...algorithms.diffusion import Loss
from ...config.diffusion import DiffusionRunConfig
from ...config.registry import DiffusionAlgorithm
from ...data.drawing_prompts import DrawPrompts
from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightAverage, WeightCopy
from ...strategy.deepspeed import TrainEngine
from ..loop import LoopSettings
from .evaluation import DiffusionEvaluation
from .graphs import RolloutGraphs
from .maker import DiffusionExperienceMaker
from .pairs import PairExperience
from .training_reward import TrainingReward


@dataclass
class DiffusionParts:
    """Everything a diffusion run is made of; `build` puts it together from a configuration."""

    config: DiffusionRunConfig
    policy: DiffusionPolicy
    engine: TrainEngine
    algorithm: DiffusionAlgorithm
    loss: Loss
    maker: DiffusionExperienceMaker
    prompts: DrawPrompts
    evaluation: DiffusionEvaluation | None
    loop: LoopSettings
    recorder: Any
    console: Any
    timer: Any
    old: WeightCopy | None = None
    ema: WeightAverage | None = None
    trained_on: TrainingReward | None = None
    pairs: PairExperience | None = None
    graphs: RolloutGraphs | None = None
