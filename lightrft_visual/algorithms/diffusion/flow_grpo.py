"""Flow-GRPO (arXiv 2505.05470) with its Fast window and CPS; DanceGRPO (2505.07818) differs in sampling only.

Also GRPO-Guard (2510.22319): log ratios freed of their bias and of the step's noise scale, gradients divided by |dt|.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ...rollout.diffusion_sampler import Step, sde_step
from ..loss_terms import LossOutputs
from ..policy_losses import MAX_LOG_RATIO, clipped_surrogate
from .context import DiffusionLoss, LossContext, summed, weighted_mean
from .denoising_batch import DenoisingBatch

T = torch.Tensor


def guarded_log_ratio(log_ratios: T, mean: T, rollout_mean: T, std: T, reduction: str) -> T:
    """GRPO-Guard's normalised log ratio (M).

    With x' = mu_old + s eps and d = mu_old - mu, log ratio = -(d² + 2 s eps d) / 2s². Adding d²/2s² removes the bias
    below zero, multiplying by s leaves -eps d, whose scale no longer depends on the step's noise.

    Args:
        log_ratios: (M).
        mean: (M, …) of the step under the present policy.
        rollout_mean: (M, …) of the step when it was drawn.
        std: (M, 1, …) of the step's noise.
        reduction: over latent dimensions, as in the log-probs.
    """
    gap = (mean - rollout_mean).square()
    dims = tuple(range(1, gap.dim()))
    gap = gap.mean(dim=dims) if reduction == "mean" else gap.sum(dim=dims)
    scale = std.flatten(1)[:, 0]
    return (log_ratios + gap / (2 * scale.square())) * scale


def gaussian_kl(mean: T, reference_mean: T, std: T, dt: T, form: str = "full") -> T:
    """(M) KL between two steps of equal standard deviation, averaged over latent dimensions.

    Args:
        mean: (M, …) of the policy's step.
        reference_mean: (M, …) of the reference's.
        std: (M, 1, …), s of both.
        dt: (M) lengths of the steps.
        form: 'full': (mu - mu_ref)² / (2 s²), the closed form; 'published', of rules whose s² is std_t² |dt|: std_t² in
            the place of s², as in the authors' code, which makes it |dt| times the closed form.
    """
    distance = (mean - reference_mean).square() / (2 * std.square())
    closed = distance.mean(dim=tuple(range(1, distance.dim())))
    return {"full": closed, "published": closed * dt.abs()}[form]


@dataclass(frozen=True)
class FlowGRPO(DiffusionLoss):
    """The clipped loss of stochastic denoising steps, for any rule of `sde_step` (DanceGRPO and DDPO use it too).

    guidance_scale: of the training forward; 1 trains without guidance. beta: weight of the KL to the reference.
    rule, noise_level and log_prob are those of the rollout: replay gives its log-probs again.
    """

    rule: str = "flow_grpo"
    noise_level: float = 0.7
    log_prob: str = "mean"
    guidance_scale: float = 1.0
    clip_range: float = 1e-4
    beta: float = 0.0
    kl_form: str = "full"
    guard: bool = False

    def replay(self, velocity: Callable[..., T], batch: DenoisingBatch) -> Step:
        """The rows' steps under the present weights: log-probs (M), mean (M, …), std (M, 1, …)."""
        v = velocity(batch.x, batch.timesteps, batch.conditions, self.guidance_scale)
        return sde_step(
            batch.x, v, batch.sigma, batch.sigma_next, self.noise_level, rule=self.rule, prev_sample=batch.x_next,
            reduction=self.log_prob,
        )  # fmt: skip

    def step(self, context: LossContext, batch: DenoisingBatch) -> Step:
        """The rows' steps, with a graph: that of the rollout where it was kept, else of their replay."""
        if batch.kept is None:
            return self.replay(context.velocity, batch)
        return Step(batch.x_next, batch.kept.log_probs, batch.kept.means, batch.kept.stds)

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Sum over valid rows / denominator, so that micro-batches and ranks add up to one batch."""
        step = self.step(context, batch)
        # In fp32: ratios within 1e-4 of 1 vanish in bf16.
        drift = step.log_prob.float() - batch.log_probs.float()
        # Other batch sizes than the rollout's round differently, in bf16 by more than a clip range of 1e-4.
        raw = step.log_prob.float() - step.log_prob.float().detach() if context.on_policy else drift
        losses, means = self.surrogate(context, raw, step, batch)
        maxima = {"logp_diff_max": (drift.detach().abs() * batch.valid).max() if len(drift) else drift.new_zeros(())}
        losses, kl = losses * self.step_weights(batch), self.kl(context, batch, step)
        return summed(losses, batch.valid, denominator, means, kl, self.beta, maxima)

    def surrogate(self, context: LossContext, raw: T, step: Step, batch: DenoisingBatch) -> tuple[T, dict[str, T]]:
        """(M) losses without the KL, and their metrics: ratios clipped on the advantage's side.

        Args:
            context: of the update.
            raw: (M) log ratios.
            step: what the policy says of the steps now.
            batch: M samples, each at one step; ConfigError when GRPO-Guard lacks the means of the rollout's steps.
        """
        ratios = raw
        if self.guard:
            if batch.rollout_means is None:
                raise ConfigError("GRPO-Guard compares step means: sample with keep_means")
            ratios = guarded_log_ratio(raw, step.mean, batch.rollout_means, step.std, self.log_prob)
        ratios = ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # log ratios of sums over pixels may overflow
        found = clipped_surrogate(ratios.exp(), batch.advantages, self.clip_range, self.clip_range)
        losses = found.values / (batch.sigma - batch.sigma_next) if self.guard else found.values
        return losses, ratio_means(raw.detach(), ratios.detach(), batch.valid, found.clipped)

    def step_weights(self, batch: DenoisingBatch) -> float | T:
        """What the loss of each row (M), but for the KL, is multiplied by: 1, every step counts alike."""
        return 1.0

    def kl(self, context: LossContext, batch: DenoisingBatch, step: Step) -> T | None:
        """(M) KL of each step to the reference policy; None where it has no weight.

        Args:
            context: for the reference.
            batch: M samples, each at one step.
            step: what the policy says of the steps now.
        """
        if self.beta == 0:
            return None
        with torch.no_grad(), context.policy.reference():
            reference = self.replay(context.velocity, batch).mean
        if self.rule == "cps":  # the surrogate log-prob has no standard deviation either
            return (step.mean - reference).square().flatten(1).mean(dim=1)
        return gaussian_kl(step.mean, reference, step.std, batch.sigma_next - batch.sigma, self.kl_form)


def ratio_means(raw: T, ratios: T, valid: T, clipped: T) -> dict[str, T]:
    """Mean of the ratios, share of clipped samples, approximate KL; over valid samples.

    Args:
        raw: (M) log ratios.
        ratios: (M).
        valid: (M) bool.
        clipped: (M) bool, where the clip, or the loss's mask, decided the value.
    """
    return {
        "ratio_mean": weighted_mean(ratios.exp(), valid),
        "clip_fraction": weighted_mean(clipped.float(), valid),
        "approx_kl": weighted_mean(0.5 * raw.square(), valid),
    }
