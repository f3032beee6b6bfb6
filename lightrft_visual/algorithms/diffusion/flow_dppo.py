"""Flow-DPPO (arXiv 2606.11025): a trust region by the exact divergence of a step, in the place of the ratio's clip.

Old and new step are Gaussians of one variance, so their KL is (mu - mu_old)² / 2 s², without the noise of a ratio.
A step is left out only where it is far from the rollout policy and would move farther away.
"""

from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ...rollout.diffusion_sampler import Step
from ..policy_losses import MAX_LOG_RATIO
from .context import LossContext, weighted_mean
from .denoising_batch import DenoisingBatch
from .flow_grpo import FlowGRPO, gaussian_kl, ratio_means

T = torch.Tensor


@dataclass(frozen=True)
class FlowDPPO(FlowGRPO):
    """-A r of each step, 0 where its KL is at least `threshold` and (r - 1) A > 0. The KL is averaged over latent
    dimensions, as in the authors' code."""

    threshold: float = 1e-5

    def surrogate(self, context: LossContext, raw: T, step: Step, batch: DenoisingBatch) -> tuple[T, dict[str, T]]:
        """See the class; ConfigError when the rollout kept no step means."""
        if batch.rollout_means is None:
            raise ConfigError("Flow-DPPO compares step means: sample with keep_means")
        dt = batch.sigma_next - batch.sigma
        divergence = gaussian_kl(step.mean.detach(), batch.rollout_means, step.std.detach(), dt)
        masked = (divergence >= self.threshold) & (raw.detach() * batch.advantages > 0)
        bounded = raw.clamp(max=MAX_LOG_RATIO)
        losses = torch.where(masked, torch.zeros_like(raw), -batch.advantages * bounded.exp())
        means = ratio_means(raw.detach(), bounded.detach(), batch.valid, masked)
        means["kl_to_rollout"] = weighted_mean(divergence, batch.valid)
        return losses, means
