"""DiffusionNFT (arXiv 2509.16117): policy improvement on the forward process, from the finished samples of an ODE.

The rollout policy `old` splits the update into a positive and a negative branch around its own velocity; no log-prob
and no trajectory is needed. `old` then follows the trained weights with a decay.
"""

import torch

from ...rollout.diffusion_sampler import per_sample
from ..loss_terms import LossOutputs
from .context import ConfiguredLoss, LossContext, asked, scaled_error, squared_error, summed, weighted_mean
from .denoising_batch import DenoisingBatch

T = torch.Tensor


def old_policy_decay(step: int, decay_type: int) -> float:
    """eta of old = eta old + (1 - eta) new after policy step n: 0; min(0.001 n, 0.5); 0 until 75, then
    min(0.0075 (n - 75), 0.999); and, as AWM's and DGPO's authors have it, min(0.001 n, 0.3)."""
    if decay_type == 0:
        return 0.0
    if decay_type in (1, 3):
        return min(0.001 * step, 0.5 if decay_type == 1 else 0.3)
    return 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999)


def optimality(advantages: T, adv_max: float, mode: str = "all") -> T:
    """(M) r = clamp(A / A_max / 2 + 1/2, 0, 1): how far a sample counts as positive.

    Args:
        advantages: (M).
        adv_max: A_max, the advantage from which on a sample is wholly positive.
        mode: how the advantage is mapped first: all keeps it, positive_only and negative_only drop one sign, one_only
            gives 1 to positive and 0 to other samples, binary takes the sign.
    """
    mapped = {
        "all": advantages,
        "positive_only": advantages.clamp(min=0),
        "negative_only": advantages.clamp(max=0),
        "one_only": (advantages > 0).to(advantages.dtype),
        "binary": advantages.sign(),
    }[mode]
    return (mapped / adv_max / 2 + 0.5).clamp(0, 1)


def nft_loss(v: T, v_old: T, mixed: T, data: T, time: T, r: T, *, beta: float = 1.0, adv_max: float = 1.0) -> T:
    """(M) (r L+ + (1 - r) L-) / beta * A_max, before the KL term.

    v+ = beta v + (1-beta) v_old, v- = (1+beta) v_old - beta v; L+ and L- are the `scaled_error` of the data that these
    predict.

    Args:
        v: (M, …) velocities of the policy.
        v_old: (M, …) of the rollout's policy.
        mixed: (M, …) data with noise.
        data: (M, …) without noise.
        time: (M) in 0..1.
        r: (M) in 0..1, from `optimality`.
        beta: how far v+ and v- lie from v_old.
        adv_max: A_max, as of `optimality`.
    """
    when = per_sample(time, mixed)
    positive = scaled_error(mixed - when * (beta * v + (1 - beta) * v_old), data)
    negative = scaled_error(mixed - when * ((1 + beta) * v_old - beta * v), data)
    return (r * positive + (1 - r) * negative) / beta * adv_max


class DiffusionNFT(ConfiguredLoss):
    """Loss of DiffusionNFT on rows of ODE rollouts; `context.old` holds the rollout weights."""

    def loss(self, context: LossContext, batch: DenoisingBatch, denominator: float | T) -> LossOutputs:
        """Sum over valid rows / denominator."""
        s, (inputs, _) = self.settings, asked(context, batch, self.guidance_scale)
        v_old = context.by_rollouts(inputs)
        v_reference = context.by_reference(inputs) if s.nft_kl_beta > 0 else None
        v = context.velocity(*inputs)
        r = optimality(batch.advantages, s.adv_clip_max, s.adv_mode)
        losses = nft_loss(v, v_old, inputs[0], batch.data, batch.sigma, r, beta=s.nft_beta, adv_max=s.adv_clip_max)
        means = {
            "optimality": weighted_mean(r, batch.valid),
            "old_deviation": weighted_mean(squared_error(v.detach(), v_old), batch.valid),
        }
        kl = None if v_reference is None else squared_error(v, v_reference)
        return summed(losses, batch.valid, denominator, means, kl, s.nft_kl_beta)
