"""`sp_size` of diffusion runs: neighbouring ranks update on the same samples and share each denoiser forward.

Rollouts and evaluations stay as they are: each rank draws samples of its own, with whole forwards.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...experience.buffer import NaiveReplayBuffer
from ...models.diffusion.context_parallel import ContextParallel
from ..diffusion.stages import drawing_batch
from ..hooks import HookContext, StepHook


@dataclass
class ContextParallelHook(StepHook):
    """Divides the denoisers from the filled buffer to the end of the step's updates."""

    denoisers: ContextParallel

    def setup(self, context: HookContext) -> None:
        """One forward of the run's size. Raises ConfigError where its tokens cannot be divided. A collective."""
        parts = context.parts
        drawing, first = parts.maker.engine.sampling, drawing_batch([parts.prompts.dataset[0]], [0], first=0)
        self.denoisers.divide()
        with torch.no_grad():
            drawing.one_forward(first, drawing.model.velocity)
        self.denoisers.join()

    def on_buffer(self, buffer: NaiveReplayBuffer) -> NaiveReplayBuffer:
        """Each rank gets the samples of its group. A collective."""
        buffer.share()
        self.denoisers.divide()
        return buffer

    def on_sync(self) -> None:
        """What follows draws samples of each rank's own."""
        self.denoisers.join()


def build(parts: Any) -> ContextParallelHook | None:
    """For an `sp_size` above 1. Raises ConfigError for denoisers that cannot be divided."""
    if parts.sequence is None:
        return None
    return ContextParallelHook(ContextParallel(parts.policy.family, parts.sequence.size))
