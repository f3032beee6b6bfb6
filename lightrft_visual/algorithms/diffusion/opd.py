"""DiffusionOPD (arXiv 2605.15055): a teacher's steps on the states that the policy's own sampling visits.

Steps of policy and teacher from one state are Gaussians of one variance, so their KL is (mu - mu_teacher)² / 2 s². It
is the whole loss: rewards are only reported.
"""

from dataclasses import dataclass

import torch

from ..loss_terms import LossOutputs
from .context import LossContext, summed, weighted_mean
from .denoising_batch import DenoisingBatch
from .flow_grpo import FlowGRPO, gaussian_kl, largest_drift, log_ratio

T = torch.Tensor


@dataclass(frozen=True)
class OnPolicyDistillation(FlowGRPO):
    """KL(policy's step || teacher's step) of each stochastic step, averaged over latent dimensions, plus beta times
    that to the reference."""

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Sum over valid samples / denominator.

        Args:
            context: with the teacher.
            batch: of the policy's own rollout.
            denominator: that of the update.

        Raises:
            ValueError: without a teacher.
        """
        if context.teacher is None:
            raise ValueError("DiffusionOPD needs a teacher in the context")
        step = self.step(context, batch)
        with torch.no_grad():
            taught = self.replay(context.teacher, batch).mean
        losses = gaussian_kl(step.mean, taught, step.std, batch.sigma_next - batch.sigma, self.kl_form)
        means = {"teacher_kl": weighted_mean(losses.detach(), batch.valid)}
        drift = log_ratio(step.log_prob, batch.log_probs).detach()
        maxima = {"logp_diff_max": largest_drift(drift, batch.valid)}
        return summed(losses, batch.valid, denominator, means, self.kl(context, batch, step), self.beta, maxima)
