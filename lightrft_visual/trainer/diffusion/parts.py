"""What a diffusion run is made of: `build` puts it together, the trainer works with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ...algorithms.diffusion import Loss
from ...config.diffusion import DiffusionRunConfig
from ...config.registry import DiffusionAlgorithm
from ...data.drawing_prompts import DrawPrompts
from ...models.diffusion.policy import DiffusionPolicy
from ...models.weight_copies import WeightCopy
from ...observe.recorder import Record
from ...runtime import collectives
from ...runtime.deepspeed import TrainEngine
from ...runtime.seeding import derive_seed
from ..hooks import Hooks
from ..loop import LoopSettings
from .evaluation import DiffusionEvaluation, DrawingWatched, records_of_drawn
from .maker import DiffusersEngine, DiffusionExperienceMaker, Drawn, PairExperience, TrainingReward
from .stages import DrawingBatch, k_repeat_prompts


class DrawingSource:
    """Hands out this rank's rows of each step. What a step has depends on the run's seed and the step alone.

    ahead: steps that the engine may begin on before they are asked for.
    """

    def __init__(self, config: DiffusionRunConfig, dataset: DrawPrompts, engine: DiffusersEngine | None = None) -> None:
        self.config, self.dataset, self.engine = config, dataset, engine
        self.ahead = config.asynchronous.ahead if engine is not None else 0

    @property
    def runs_ahead(self) -> bool:
        """Whether rollouts may be of earlier policies."""
        return self.ahead > 0

    def next(self, step: int, total_steps: int) -> DrawingBatch:
        """The rows of step number `step`, from 0 on."""
        requests = self._requests(step)
        for later in range(step, min(step + self.ahead + 1, total_steps)) if self.ahead else ():
            self.engine.announce(later, partial(self._requests, later))
        return requests

    def _requests(self, step: int) -> DrawingBatch:
        sampling = self.config.sampling
        seed = derive_seed(self.config.train.seed, "k_repeat", step)
        per_rank = sampling.rollout_batch_size * sampling.n_samples_per_prompt // collectives.world_size()
        return k_repeat_prompts(self.dataset, per_rank, sampling.n_samples_per_prompt, seed)


class PairSource(DrawingSource):
    """Of pairs of a file: what names a step's pairs is a seed."""

    def next(self, step: int, total_steps: int) -> int:
        """The seed of step number `step`."""
        return derive_seed(self.config.train.seed, "k_repeat", step)


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
    teacher: DiffusionPolicy | None = None

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
