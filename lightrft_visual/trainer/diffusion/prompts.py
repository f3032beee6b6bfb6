"""Where the rows of a diffusion step come from: prompts of the data set, each several times, spread over ranks."""

from __future__ import annotations

from functools import partial

from ...config.diffusion import DiffusionRunConfig
from ...data.drawing_prompts import DrawPrompts
from ...runtime import collectives
from ...runtime.seeding import derive_seed
from .maker import DiffusersEngine
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
