"""One denoising step as a pure function: the same arithmetic samples a rollout and replays it in training.

Flow-matching rules read v, the velocity (noise minus data), at x = (1 - sigma) data + sigma noise, with sigma falling
from 1 to 0 and dt = sigma_next - sigma < 0. The DDIM rule reads v as predicted noise at
x = sqrt(1 - sigma^2) data + sigma noise. All arithmetic is fp32 (fp64 inputs stay fp64), as ratios near 1 need it.

Sources: Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), FastVideo's sde_reflow, coefficients-preserving sampling
(2509.05952), DDIM (2010.02502) with the policy-gradient view of DDPO (2305.13301).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..errors import ConfigError
from ..experience.diffusion_sampling import REDUCTIONS
from ..models.diffusion.schedule import upcast

T = torch.Tensor
RULES = ("flow_grpo", "dance", "reflow", "cps", "ddim")


class Step(NamedTuple):
    """prev (B, …) the next latents; log_prob (B); mean (B, …); std (B, 1, …) of the transition."""

    prev: T
    log_prob: T
    mean: T
    std: T


def per_sample(value: float | T, like: T) -> T:
    """A float, a scalar tensor or a (B) tensor as (B, 1, …), in the dtype and on the device of `like` (B, …)."""
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tensor.expand(like.shape[0]).reshape(-1, *([1] * (like.dim() - 1)))


def euler_step(x: T, v: T, sigma: float | T, sigma_next: float | T) -> T:
    """x + v dt in at least fp32: the deterministic flow-matching step. Shapes as in `sde_step`."""
    x, v = upcast(x), upcast(v)
    return x + v * (per_sample(sigma_next, x) - per_sample(sigma, x))


def sde_step(
    x: T,
    v: T,
    sigma: float | T,
    sigma_next: float | T,
    noise_level: float,
    *,
    rule: str = "flow_grpo",
    prev_sample: T | None = None,
    noise: T | None = None,
    reduction: str = "mean",
) -> Step:
    """One stochastic step from x at sigma to sigma_next, or the log-prob of a step that was taken.

    x, v (B, …); sigma, sigma_next: floats or (B). noise_level: Flow-GRPO's `a`, DanceGRPO's and DDIM's eta, the CPS
    level in 0..1; reflow has none. Give either `noise` (B, …), unit normal, to sample, or `prev_sample` (B, …) to
    score. The log-prob is averaged or summed over latent dimensions; for cps it is the published surrogate
    -(x' - mean)^2, no density.
    Raises ConfigError for an unknown rule or reduction, and for a sample of a step without noise: its log-prob is
    undefined. Where such a step is scored it is NaN: to look for it would make the host wait for the device.
    """
    if (prev_sample is None) == (noise is None):
        raise ValueError("give either noise, to sample a step, or prev_sample, to score one")
    x, v = upcast(x), upcast(v)
    mean, std = transition(x, v, sigma, sigma_next, noise_level, rule=rule)
    if noise is not None and rule != "cps" and bool((std <= 0).any()):
        raise ConfigError("the step has no noise (noise_level or the step size is 0), so it has no log-prob")
    prev = mean + std * upcast(noise) if prev_sample is None else upcast(prev_sample)
    return Step(prev, transition_log_prob(prev.detach(), mean, std, rule=rule, reduction=reduction), mean, std)


def transition(x: T, v: T, sigma: float | T, sigma_next: float | T, noise_level: float, *, rule: str) -> tuple[T, T]:
    """Mean (B, …) and standard deviation (B, 1, …) of the step; noise_level 0 gives the rule's ODE step, std 0."""
    if rule not in RULES:
        raise ConfigError(f"step rule {rule!r} is unknown; it must be one of: {', '.join(RULES)}")
    return _TRANSITIONS[rule](x, v, per_sample(sigma, x), per_sample(sigma_next, x), noise_level)


def transition_log_prob(prev: T, mean: T, std: T, *, rule: str, reduction: str = "mean") -> T:
    """(B) log-prob of prev under N(mean, std²), averaged or summed over latent dimensions (cps: see `sde_step`); NaN
    without noise."""
    if reduction not in REDUCTIONS:
        raise ConfigError(f"log-prob reduction {reduction!r} is unknown; it must be one of: {', '.join(REDUCTIONS)}")
    if rule == "cps":
        density = -(prev - mean).square()
    else:
        density = -(prev - mean).square() / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
    dims = tuple(range(1, density.dim()))
    return density.mean(dim=dims) if reduction == "mean" else density.sum(dim=dims)


def flow_grpo_diffusion(sigma: T, sigma_next: T, noise_level: float) -> T:
    """std_t = noise_level sqrt(sigma / (1 - sigma)), without the sqrt(-dt); at sigma = 1 the next sigma divides."""
    remaining = torch.where(sigma >= 1, 1 - sigma_next, 1 - sigma)
    return noise_level * (sigma / remaining).sqrt()


def _flow_grpo(x: T, v: T, sigma: T, sigma_next: T, noise_level: float) -> tuple[T, T]:
    dt = sigma_next - sigma
    diffusion = flow_grpo_diffusion(sigma, sigma_next, noise_level)
    drift = diffusion.square() / (2 * sigma)
    mean = x * (1 + drift * dt) + v * ((1 + drift * (1 - sigma)) * dt)
    return mean, diffusion * (-dt).sqrt()


def _dance(x: T, v: T, sigma: T, sigma_next: T, noise_level: float) -> tuple[T, T]:
    dt = sigma_next - sigma
    data = x - sigma * v
    score = -(x - (1 - sigma) * data) / sigma.square()
    mean = x + v * dt - 0.5 * noise_level**2 * score * dt
    return mean, noise_level * (-dt).sqrt()


def _reflow(x: T, v: T, sigma: T, sigma_next: T, noise_level: float) -> tuple[T, T]:
    """The predicted data, noised anew to sigma_next: nothing is left of the noise in x."""
    return (1 - sigma_next) * (x - sigma * v), sigma_next


def _cps(x: T, v: T, sigma: T, sigma_next: T, noise_level: float) -> tuple[T, T]:
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    data, noise = x - sigma * v, x + (1 - sigma) * v
    if noise_level == 0:  # the same point, without the rounding of the two detours
        return x + v * (sigma_next - sigma), std
    return (1 - sigma_next) * data + (sigma_next.square() - std.square()).clamp_min(0).sqrt() * noise, std


def _ddim(x: T, eps: T, sigma: T, sigma_next: T, noise_level: float) -> tuple[T, T]:
    signal, signal_next = (1 - sigma.square()).sqrt(), (1 - sigma_next.square()).sqrt()
    data = (x - sigma * eps) / signal
    variance = (sigma_next / sigma).square() * (1 - (signal / signal_next).square())
    std = noise_level * variance.clamp_min(0).sqrt()
    mean = signal_next * data + (sigma_next.square() - std.square()).clamp_min(0).sqrt() * eps
    return mean, std


_TRANSITIONS = {"flow_grpo": _flow_grpo, "dance": _dance, "reflow": _reflow, "cps": _cps, "ddim": _ddim}
