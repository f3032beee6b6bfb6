"""Reward-weighted regression: supervised training on the model's own samples, the better ones weighted more.

The plain baseline that DDPO's authors compare with (RWR, arXiv 2305.13301, section 4), after Peters and Schaal (2007)
and Lee et al. (arXiv 2302.12192).
"""

import torch

from ..loss_terms import LossOutputs
from .context import ConfiguredLoss, LossContext, asked, squared_error, summed, weighted_mean
from .denoising_batch import DenoisingBatch

T = torch.Tensor


class RewardWeighted(ConfiguredLoss):
    """exp(A / rwr_temperature) times the matching error of each finished sample; beta: of a KL by velocities."""

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Sum over valid rows / denominator."""
        s, (inputs, target) = self.settings, asked(context, batch, self.guidance_scale)
        reference = context.by_reference(inputs) if s.beta > 0 else None
        v = context.velocity(*inputs)
        error, weights = squared_error(v, target), (batch.advantages / s.rwr_temperature).exp()
        means = {
            "matching_error": weighted_mean(error.detach(), batch.valid),
            "sample_weight": weighted_mean(weights, batch.valid),
        }
        kl = None if reference is None else squared_error(v, reference)
        return summed(weights * error, batch.valid, denominator, means, kl, s.beta)
