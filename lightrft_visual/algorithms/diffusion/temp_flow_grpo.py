"""TempFlow-GRPO (arXiv 2508.04324): credit to the denoising step that earned it.

All samples of a prompt start from one noise and follow the ODE but for one step, at which they branch: what their
rewards differ by is that step's doing. The loss is weighted by the noise of the step, as early steps decide more; the
KL is not, as in the authors' code.
"""

from dataclasses import dataclass

import torch

from ...rollout.diffusion_sampler import flow_grpo_diffusion
from ...runtime.host_copies import to_device
from .denoising_batch import DenoisingBatch
from .flow_grpo import FlowGRPO

T = torch.Tensor


@dataclass(frozen=True)
class TempFlowGRPO(FlowGRPO):
    """Flow-GRPO's loss, each step weighted by its noise; the branching is in the rollout: a window of one step and
    `same_latent`."""

    def step_weights(self, batch: DenoisingBatch) -> T:
        """(M) standard deviation of each row's step over the mean of all steps' but the last, which is
        deterministic."""
        sigma, following = batch.schedule[:, :-2], batch.schedule[:, 1:-1]
        std = flow_grpo_diffusion(sigma, following, self.noise_level) * (sigma - following).sqrt()
        drawn = following > 0  # where the schedule itself ends at 0, the last step of a length is another one
        mean = (std * drawn).sum(dim=1, keepdim=True) / drawn.sum(dim=1, keepdim=True)
        return (std / mean).gather(1, to_device(batch.steps[:, None], std.device))[:, 0]
