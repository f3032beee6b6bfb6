"""Centered Reward Distillation (arXiv 2603.14128): the model's implicit reward is fitted to the given one.

A sample's implicit reward is how much better the model names the forward noise than the rollout policy does,

    r = -(|v - u|² / w - |v_old - u|² / w_old),   w = mean |v - u| without gradient

and the optimum of the KL-regularised objective has beta r = reward - C with C of the prompt. Centering both sides over
the prompt's samples takes C away:

    loss = (beta (r - mean r) - (a - mean a))² A_max / beta + kl_beta c(a) |v - v_ref|²

with a = clamp(A / A_max / 2 + 1/2, 0, 1), no gradient through the means, and c(a) = c0 + (1 - c0) a with
c0 = 1e-4 / kl_beta: good samples are held to the reference the most. As DGPO's, the gradient is a sum over samples once
the means are known.
"""

import torch

from ..loss_terms import LossOutputs
from .context import ConfiguredLoss, LossContext, asked, scaled_error, squared_error, summed, weighted_mean
from .denoising_batch import DenoisingBatch
from .nft import optimality
from .preference import sums_of_groups

T = torch.Tensor
LEAST_KL = 1e-4  # weight of the KL of a sample of reward 0


class CenteredReward(ConfiguredLoss):
    """The loss above with crd_beta, adv_clip_max and, as kl_beta, beta: 0 is no KL. `context.old` holds the rollout
    weights."""

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Sum over valid samples / denominator.

        Args:
            context: with the rollout policy's weights.
            batch: its coupling (M, 2) is the sum of beta r - a over the sample's group, and its valid samples; None
                where the batch holds whole groups.
            denominator: that of the update.
        """
        s, (inputs, target) = self.settings, asked(context, batch, self.guidance_scale)
        v_old = context.by_rollouts(inputs)
        v_base = context.by_reference(inputs) if s.beta > 0 else None
        v = context.velocity(*inputs)
        reward = optimality(batch.advantages, s.adv_clip_max)
        implicit = scaled_error(v_old, target) - scaled_error(v, target)
        gap = s.crd_beta * implicit - reward
        sums = sums_of_groups(_terms(gap, batch), batch) if batch.coupling is None else batch.coupling
        centered = gap - sums[:, 0] / sums[:, 1].clamp_min(1)
        losses = centered.square() * s.adv_clip_max / s.crd_beta
        means = {
            "implicit_reward": weighted_mean(implicit.detach(), batch.valid),
            "reward_gap": weighted_mean(centered.detach().square(), batch.valid),
            "old_deviation": weighted_mean(squared_error(v.detach(), v_old), batch.valid),
        }
        if v_base is None:
            return summed(losses, batch.valid, denominator, means)
        least = min(LEAST_KL / s.beta, 1.0)
        kl_weight = s.beta * (least + (1 - least) * reward)
        return summed(losses, batch.valid, denominator, means, squared_error(v, v_base), kl_weight)

    @torch.no_grad()
    def terms(self, context: LossContext, batch: DenoisingBatch) -> T:
        """(M, 2) beta r - a and 1 of each sample, 0 of an invalid one: what its group's means are made of."""
        inputs, target = asked(context, batch, self.guidance_scale)
        implicit = scaled_error(context.by_rollouts(inputs), target)
        implicit = implicit - scaled_error(context.velocity(*inputs), target)
        reward = optimality(batch.advantages, self.settings.adv_clip_max)
        return _terms(self.settings.crd_beta * implicit - reward, batch)


def _terms(gap: T, batch: DenoisingBatch) -> T:
    valid = batch.valid.to(gap.dtype)
    return torch.stack([torch.where(batch.valid, gap.detach(), 0.0), valid], dim=1)
