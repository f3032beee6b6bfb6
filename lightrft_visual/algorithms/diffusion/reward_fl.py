"""Reward feedback learning: the gradient of a differentiable reward through VAE decode and the late denoising steps.

After ReFL (arXiv 2304.05977) and ROLL's Reward FL. Steps before `mid_timestep` run without gradient; from it to
`final_timestep` the velocity carries one, and at `final_timestep` the data is predicted in one jump (the ordinary
Euler step when it is the last step). Of a model with two experts, a step that is served by a frozen one carries none
either.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...config.diffusion import DiffusionRunConfig, gradient_steps
from ...rollout.diffusion_sampler import euler_step
from ...runtime.host_copies import to_device
from ..loss_terms import LossOutputs
from .context import LossContext, squared_error, training_guidance, weighted_mean

T = torch.Tensor


class DifferentiableScore(NamedTuple):
    """scores (B) with gradient; valid (B) bool, false where the reward found nothing to score (no face, no caption)."""

    scores: T
    valid: T


class RewardFL:
    """The loss by the settings of Reward FL; steps count from 0 (pure noise). See the module's docstring.

    score_target: a score that is enough. An image that reaches it has no gradient, as in ReFL's hinge
    max(0, target - score), so that good images are not pulled on to the one that the reward likes most. None pulls on
    all of them.
    """

    def __init__(self, config: DiffusionRunConfig) -> None:
        self.settings, self.num_steps = config.algorithm, config.sampling.num_steps
        self.guidance_scale = training_guidance(config)

    def denoise(
        self, context: LossContext, start: T, conditions: dict[str, T], timesteps: T, sigmas: T
    ) -> tuple[T, T | None]:
        """From noise to data: latents (B, …) with gradient, and the mean squared distance (B) of the velocity to the
        reference's over the steps with gradient, None without beta.

        Args:
            context: whose `velocity` is asked.
            start: (B, …) noise.
            conditions: (B, …) each.
            timesteps: (K), K = num_steps.
            sigmas: (K), of the same steps.
        """
        x, drifts, s = start, [], self.settings
        differentiated = gradient_steps(self.num_steps, s.mid_timestep, s.final_timestep)
        for step in range(s.final_timestep + 1):
            inputs = (x, to_device(timesteps[step].expand(len(x)), x.device), conditions, self.guidance_scale)
            if step in differentiated and context.policy.trains_at(timesteps[step]):
                v = context.velocity(*inputs)
                if s.beta > 0:
                    drifts.append(squared_error(v, context.by_reference(inputs)))
            else:
                with torch.no_grad():
                    v = context.velocity(*inputs)
            following = 0.0 if step == s.final_timestep else sigmas[step + 1]
            x = euler_step(x, v, sigmas[step], following)
        return x, torch.stack(drifts).mean(dim=0) if drifts else None

    def loss(
        self, context: LossContext, start: T, conditions: dict[str, T], schedule: tuple[T, T],
        reward: Callable[[T], DifferentiableScore], denominator: float | T,
    ) -> LossOutputs:  # fmt: skip
        """-reward_fl_weight (min(score, target) - mean) / std + beta |v - v_ref|², over valid samples / denominator.

        Args:
            context: the model, which also decodes, and its reference.
            start: (B, …) noise.
            conditions: {name: (B, …)}.
            schedule: timesteps (K) and sigmas (K).
            reward: scores media in 0..1, with gradients.
            denominator: samples of the whole update. Invalid ones are among them: how many there are is known when
                all are scored, and each micro-batch's gradient is made before.
        """
        s = self.settings
        latents, drift = self.denoise(context, start, conditions, *schedule)
        media = context.policy.decode(latents)
        scored = reward(media)
        if media.requires_grad:
            media.register_hook(partial(_of_valid, scored.valid))  # the scores themselves would keep their own graph
        scores = scored.scores
        means = {"reward": weighted_mean(scores.detach(), scored.valid)}
        if s.score_target is not None:
            means["target_share"] = weighted_mean((scores.detach() >= s.score_target).float(), scored.valid)
            scores = scores.clamp(max=s.score_target)
        losses = -s.reward_fl_weight * (scores - s.score_mean) / s.score_std
        if drift is not None:
            losses = losses + s.beta * drift
            means["kl"] = weighted_mean(drift.detach(), scored.valid)
        nothing = 0 * latents.float().mean()  # scores need no graph where none of them is valid
        return LossOutputs(_of_valid(scored.valid, losses).sum() / denominator + nothing, means=means)


def _of_valid(valid: T, values: T) -> T:
    """(B, …), 0 for samples that are not valid: they may hold NaN, and so may the gradient of their score."""
    return torch.where(valid.view(-1, *[1] * (values.dim() - 1)), values, 0.0)
