"""DDPO (arXiv 2305.13301) and DPOK (2305.16381) for DDIM models such as Stable Diffusion 1.5."""

from dataclasses import dataclass

import torch

from ..loss_terms import LossOutputs
from .context import LossContext, summed
from .denoising_batch import DenoisingBatch
from .flow_grpo import FlowGRPO, largest_drift, log_ratio

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

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """-A log p + beta KL, summed over valid rows / denominator."""
        step = self.step(context, batch)
        losses = -batch.advantages * step.log_prob
        maxima = {"logp_diff_max": largest_drift(log_ratio(step.log_prob, batch.log_probs).detach(), batch.valid)}
        return summed(losses, batch.valid, denominator, {}, self.kl(context, batch, step), self.beta, maxima)
