"""DiffusionOPD (arXiv 2605.15055): a teacher's steps on the states that the policy's own sampling visits.

Steps of policy and teacher from one state are Gaussians of one variance, so their KL is (mu - mu_teacher)² / 2 s². It
is the whole loss: rewards are only reported.
"""

from dataclasses import dataclass

import torch

from ...rollout.diffusion_sampler import Step
from .context import LossContext, weighted_mean
from .denoising_batch import DenoisingBatch
from .flow_grpo import FlowGRPO, gaussian_kl

T = torch.Tensor


@dataclass(frozen=True)
class OnPolicyDistillation(FlowGRPO):
    """KL(policy's step || teacher's step) of each stochastic step, averaged over latent dimensions, plus beta times
    that to the reference."""

    def surrogate(self, context: LossContext, raw: T, step: Step, batch: DenoisingBatch) -> tuple[T, dict[str, T]]:
        """The KL to the teacher's steps. Raises ValueError without a teacher in the context."""
        if context.teacher is None:
            raise ValueError("DiffusionOPD needs a teacher in the context")
        with torch.no_grad():
            taught = self.replay(context.teacher, batch).mean
        losses = gaussian_kl(step.mean, taught, step.std, batch.sigma_next - batch.sigma, self.kl_form)
        return losses, {"teacher_kl": weighted_mean(losses.detach(), batch.valid)}
