"""DDPO (arXiv 2305.13301) and DPOK (2305.16381) for DDIM models such as Stable Diffusion 1.5."""

from dataclasses import dataclass

import torch

from ...rollout.diffusion_sampler import Step
from .context import LossContext
from .denoising_batch import DenoisingBatch
from .flow_grpo import FlowGRPO

T = torch.Tensor


@dataclass(frozen=True)
class DDPO(FlowGRPO):
    """DDPO with importance sampling: the clipped loss on DDIM steps of eta = noise_level."""

    rule: str = "ddim"
    noise_level: float = 1.0


@dataclass(frozen=True)
class DPOK(DDPO):
    """Policy gradient on the step's log-prob, without clipping, with a KL to the reference (beta > 0)."""

    beta: float = 0.01

    def surrogate(self, context: LossContext, raw: T, step: Step, batch: DenoisingBatch) -> tuple[T, dict[str, T]]:
        """-A log p, without metrics of its own."""
        return -batch.advantages * step.log_prob, {}
