"""Advantage Weighted Matching (arXiv 2509.25050): the loss of pretraining, weighted by the advantage.

The log-likelihood of a finished sample is replaced by minus the error of the model on it with fresh noise, so rollouts
may come from any sampler, and the policy gradient has the variance of pretraining's loss, not that of noisy steps.
"""

import torch

from ..loss_terms import LossOutputs
from ..policy_losses import clipped_surrogate
from .context import ConfiguredLoss, LossContext, asked, squared_error, summed, weighted_mean
from .denoising_batch import DenoisingBatch
from .flow_grpo import ratio_means

T = torch.Tensor
_TINY = 1e-10


class AWM(ConfiguredLoss):
    """Loss of AWM on rows of finished samples; `context.old` holds the rollout weights.

    awm_weighting: what errors are multiplied by at a noise level: uniform, time, time_squared: 1, sigma, sigma². huber,
    the authors' choice: sigma (error^power - tiny^power) / power with awm_power, in place of the error, whose gradient
    falls as it grows. adv_clip_max: advantages are clamped to ±this and divided by it. beta, old_beta: weights of the
    squared distance of the velocity to the reference's and to the rollout policy's.
    """

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """max(-A r, -A clip(r)) + KLs, summed over valid rows / denominator."""
        s, (inputs, target) = self.settings, asked(context, batch, self.guidance_scale)
        v_old = context.by_rollouts(inputs)
        v_reference = context.by_reference(inputs) if s.beta > 0 else None
        v = context.velocity(*inputs)
        log_ratio = self.log_prob(squared_error(v, target), batch.sigma)
        log_ratio = log_ratio - self.log_prob(squared_error(v_old, target), batch.sigma)
        advantages = batch.advantages.clamp(-s.adv_clip_max, s.adv_clip_max) / s.adv_clip_max
        found = clipped_surrogate(log_ratio.exp(), advantages, s.clip_range, s.clip_range)
        moved = squared_error(v, v_old)
        losses = found.values + s.old_beta * moved
        raw = log_ratio.detach()
        means = ratio_means(raw, raw, batch.valid, found.clipped)
        means |= {
            "matching_error": weighted_mean(squared_error(v.detach(), target), batch.valid),
            "old_deviation": weighted_mean(moved.detach(), batch.valid),
        }
        kl = None if v_reference is None else squared_error(v, v_reference)
        return summed(losses, batch.valid, denominator, means, kl, s.beta)

    def log_prob(self, error: T, sigma: T) -> T:
        """(M) what stands for the log-likelihood, of matching errors (M) at noise levels (M) in 0..1."""
        power = self.settings.awm_power
        if self.settings.awm_weighting == "huber":
            return -sigma * ((error + _TINY).pow(power) - _TINY**power) / power
        weights = {"uniform": torch.ones_like(sigma), "time": sigma, "time_squared": sigma.square()}
        return -error * weights[self.settings.awm_weighting]
