"""GRPO on the tokens that the autoregressive half of a model of two parts draws; the diffusion half stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..aggregation import LossOutputs
from ..policy_losses import clipped_surrogate
from .context import LossContext, weighted_mean
from .flow_grpo import largest_drift, log_ratio, ratio_means
from .rows import DenoisingBatch

T = torch.Tensor


@dataclass(frozen=True)
class TokenGRPO:
    """Clipped importance ratios of every token, averaged over a sample's tokens (GRPO, arXiv 2402.03300).

    beta: weight of the KL to the reference, exp(d) - d - 1 with d the reference's log-prob minus the policy's.
    """

    clip_range: float = 0.2
    beta: float = 0.0

    def loss(self, context: LossContext, rows: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Sum over valid rows / denominator; a row is a sample, its conditions hold its tokens (M, 1, N)."""
        log_probs = self.log_probs(context, rows)
        drift = log_ratio(log_probs, rows.conditions["drawn_log_probs"][:, 0])
        raw = log_probs - log_probs.detach() if context.on_policy else drift
        advantages = rows.advantages[:, None].expand_as(raw)
        losses = clipped_surrogate(raw.exp(), advantages, self.clip_range, self.clip_range).values.mean(dim=1)
        valid = rows.valid[:, None].expand_as(raw)
        means = ratio_means(raw.detach(), raw.detach(), valid, self.clip_range)
        if self.beta > 0:
            with torch.no_grad(), context.policy.reference():
                reference = self.log_probs(context, rows)
            gap = reference - log_probs
            kl = (gap.exp() - gap - 1).mean(dim=1)
            losses = losses + self.beta * kl
            means["kl"] = weighted_mean(kl.detach(), rows.valid)
        maxima = {"logp_diff_max": largest_drift(drift.detach().abs().amax(dim=1), rows.valid)}
        return LossOutputs((losses * rows.valid).sum() / denominator, means=means, maxima=maxima)

    @staticmethod
    def log_probs(context: LossContext, rows: DenoisingBatch) -> T:
        """(M, N) of the rows' tokens under the present weights."""
        return context.velocity(rows.x, rows.timesteps, rows.conditions, tokens=True)
