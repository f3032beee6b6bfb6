"""The diffusion sampler: a thin loop over a velocity model and a noise schedule, apart from any pipeline.

Noise comes from one generator per sample, so a sample does not depend on the batch, the rank or the order of work it
was drawn in. Latents, trajectory and log-probs are fp32 (fp64 latents stay fp64): batch replay then gives the rollout's
log-probs exactly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ..errors import ConfigError
from ..experience.diffusion_sampling import (
    REDUCTIONS,
    TRAIN_TIMESTEPS,
    DiffusionBatch,
    KeptSteps,
    NoiseConfig,
    SamplingConfig,
    SamplingResult,
    check_noise,
)
from ..models.diffusion.layers import flow_match_schedule, stock_flow_match_schedule, upcast
from ..runtime import collectives
from ..runtime.host_copies import pinned, to_device
from ..runtime.seeding import derive_seed

if TYPE_CHECKING:
    from ..models.diffusion.families.base import DiffusionFamily

logger = logging.getLogger(__name__)
T = torch.Tensor
MOST_NOISE = 1.5  # deviation that a step adds


class Step(NamedTuple):
    """prev (B, …) the next latents; log_prob (B); mean (B, …); std (B, 1, …) of the transition."""

    prev: T
    log_prob: T
    mean: T
    std: T


def per_sample(value: float | T, like: T) -> T:
    """A float, a scalar tensor or a (B) tensor as (B, 1, …), in the dtype and on the device of `like` (B, …)."""
    tensor = to_device(torch.as_tensor(value, dtype=like.dtype), like.device)
    return tensor.expand(like.shape[0]).reshape(-1, *([1] * (like.dim() - 1)))


def euler_step(x: T, v: T, sigma: float | T, sigma_next: float | T) -> T:
    """x + v dt in at least fp32: the deterministic flow-matching step. Args: as of `sde_step`."""
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

    Args:
        x: (B, …) latents.
        v: (B, …) what the model answers there.
        sigma: where they are; a float or (B).
        sigma_next: where they go.
        noise_level: Flow-GRPO's `a`, DanceGRPO's and DDIM's eta, the CPS level in 0..1; reflow has none.
        rule: one of RULES.
        prev_sample: (B, …) the step that was taken, to score it.
        noise: (B, …) unit normal, to sample a step; either this or `prev_sample`.
        reduction: whether the log-prob is averaged ('mean') or summed ('sum') over latent dimensions; for cps it is the
            published surrogate -(x' - mean)^2, no density.

    Raises ConfigError for an unknown rule or reduction, and for a sample of a step without noise: its log-prob is
    undefined. Where such a step is scored it is NaN: to look for it would make the host wait for the device.
    """
    if (prev_sample is None) == (noise is None):
        raise ValueError("give either noise, to sample a step, or prev_sample, to score one")
    x, v = upcast(x), upcast(v)
    mean, std = transition(x, v, sigma, sigma_next, noise_level, rule=rule)
    if noise is not None and rule != "cps" and _without_noise(sigma, sigma_next, noise_level, rule):
        raise ConfigError("the step has no noise (noise_level or the step size is 0), so it has no log-prob")
    prev = mean + std * upcast(noise) if prev_sample is None else upcast(prev_sample)
    if reduction not in REDUCTIONS:
        raise ConfigError(f"log-prob reduction {reduction!r} is unknown; it must be one of: {', '.join(REDUCTIONS)}")
    density = -(prev.detach() - mean).square()
    if rule != "cps":
        density = density / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
    dims = tuple(range(1, density.dim()))
    log_prob = density.mean(dim=dims) if reduction == "mean" else density.sum(dim=dims)
    return Step(prev, log_prob, mean, std)


def _without_noise(sigma: float | T, sigma_next: float | T, noise_level: float, rule: str) -> bool:
    """Whether a step has none, by sigmas on the host; of others nobody asks, as it would make the host wait."""
    ends = [torch.as_tensor(each, dtype=torch.float64).reshape(-1) for each in (sigma, sigma_next)]
    if any(each.device.type != "cpu" for each in ends):
        return False
    nothing = torch.zeros(max(map(len, ends)), dtype=torch.float64)
    return bool((transition(nothing, nothing, *ends, noise_level, rule=rule)[1] <= 0).any())


def transition(x: T, v: T, sigma: float | T, sigma_next: float | T, noise_level: float, *, rule: str) -> tuple[T, T]:
    """Mean (B, …) and standard deviation (B, 1, …) of the step. Raises ConfigError for a rule that is none of RULES.

    Args: as of `sde_step`; a noise_level of 0 gives the rule's ODE step, std 0.
    """
    if rule not in RULES:
        raise ConfigError(f"step rule {rule!r} is unknown; it must be one of: {', '.join(RULES)}")
    return _TRANSITIONS[rule](x, v, per_sample(sigma, x), per_sample(sigma_next, x), noise_level)


def flow_grpo_diffusion(sigma: T, sigma_next: T, noise_level: float) -> T:
    """std_t = noise_level sqrt(sigma / (1 - sigma)), without the sqrt(-dt).

    Args:
        sigma: (B, 1, …) where samples are.
        sigma_next: (B, 1, …) where they go; divides at sigma = 1.
        noise_level: Flow-GRPO's `a`.
    """
    remaining = torch.where(sigma > 1 - 1e-5, 1 - sigma_next, 1 - sigma)  # for 1 schedulers have 0.999999
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
    return (1 - sigma_next) * data + (sigma_next.square() - std.square()).sqrt() * noise, std


def _ddim(x: T, eps: T, sigma: T, sigma_next: T, noise_level: float) -> tuple[T, T]:
    signal, signal_next = (1 - sigma.square()).sqrt(), (1 - sigma_next.square()).sqrt()
    data = (x - sigma * eps) / signal
    variance = (sigma_next / sigma).square() * (1 - (signal / signal_next).square())
    std = noise_level * variance.clamp_min(0).sqrt()
    mean = signal_next * data + (sigma_next.square() - std.square()).clamp_min(0).sqrt() * eps
    return mean, std


_TRANSITIONS = {"flow_grpo": _flow_grpo, "dance": _dance, "reflow": _reflow, "cps": _cps, "ddim": _ddim}
RULES = tuple(_TRANSITIONS)
FLOW_RULES = {"sde": "flow_grpo", "sde_reflow": "reflow", "dance": "dance", "cps": "cps"}


class VelocityModel(Protocol):
    """What the sampler asks of a model; `lightrft_visual.models.diffusion.policy.DiffusionPolicy` is one.

    family: says what it predicts, its schedule, its shift and the scale of its first latents.
    """

    family: DiffusionFamily

    def velocity(self, latents: T, timesteps: T, conditions: dict[str, T], guidance_scale: float) -> T:
        """What it predicts, (B, …). Args: as of `DiffusionFamily.velocity`."""


def sample_generators(
    run_seed: int, step: int, indices: Sequence[int], purpose: str = "noise"
) -> list[torch.Generator]:
    """One CPU generator per sample, seeded by these and nothing else.

    Args:
        run_seed: of the run.
        step: of the policy.
        indices: of the samples, over all ranks.
        purpose: what is drawn; other purposes have other streams.
    """
    return [torch.Generator().manual_seed(derive_seed(run_seed, purpose, step, int(index))) for index in indices]


def draw_noise(
    shape: tuple[int, ...], generators: Sequence[torch.Generator], dtype: torch.dtype, device: torch.device
) -> T:
    """(B, *shape) unit normal.

    Args:
        shape: of a sample.
        generators: one a sample, which draws on its own device.
        dtype: that it is drawn in.
        device: where it goes, without waiting for what that one is still computing.
    """
    noises = [torch.randn(shape, generator=generator, dtype=dtype, device=generator.device) for generator in generators]
    noise = torch.stack(noises)
    waits = device.type == noise.device.type or noise.device.type != "cpu"
    return noise.to(device) if waits else pinned(noise).to(device, non_blocking=True)


def window_starts(num_steps: int, noise: NoiseConfig) -> range:
    """The steps at which a window may begin, see `window_start`."""
    size = noise.window_size
    if not size:
        return range(1)
    start, end = noise.window_range or (
        0, max(num_steps // 2, size) if noise.window_move == "random" else num_steps - 1
    )  # fmt: skip
    return range(start, end - size + 1)


def window_start(num_steps: int, noise: NoiseConfig, run_seed: int, step: int) -> int:
    """First stochastic step of the window in the rollouts of a policy step; 0 where there is no window.

    It lies in the steps [start, end) of noise.window_range. 'random': drawn for each policy step (Flow-GRPO-Fast), by
    default in the first half of the steps, or the shortest range that holds the window; 'anywhere': likewise, in all
    but the last. 'slide' (MixGRPO, arXiv 2507.21802): from the range's start by window_stride after every
    window_interval policy steps, and it stays at the end; 'cycle' begins anew there.

    Args:
        num_steps: of a rollout.
        noise: window_size, window_move and the others.
        run_seed: of the run, for what is drawn.
        step: of the policy.
    """
    starts, move = window_starts(num_steps, noise), noise.window_move
    if len(starts) == 1:
        return starts[0]
    if move in ("slide", "cycle"):
        moved = noise.window_stride * (step // noise.window_interval)
        return starts[min(moved, len(starts) - 1) if move == "slide" else moved % len(starts)]
    generator = torch.Generator().manual_seed(derive_seed(run_seed, "window", step))
    return starts[int(torch.randint(len(starts), (1,), generator=generator))]


class DiffusionSampler:
    """Draws samples by one SamplingConfig; see `sample`. Raises ConfigError where trajectory and noise do not fit."""

    def __init__(self, config: SamplingConfig, noise: NoiseConfig | None = None) -> None:
        self.config = config
        self.noise = noise or NoiseConfig()
        check_noise(config, self.noise)

    def schedule(self, model: VelocityModel, latent_shape: tuple[int, ...]) -> tuple[T, T]:
        """Timesteps (K) and sigmas (K), fp32 on the CPU."""
        config = self.config
        if config.given is not None:
            given = config.sigmas if config.sigmas is not None else [t / TRAIN_TIMESTEPS for t in config.timesteps]
            sigmas = torch.tensor(given, dtype=torch.float64)
            timesteps = sigmas * TRAIN_TIMESTEPS if config.timesteps is None else torch.tensor(config.timesteps)
            return timesteps.float(), sigmas.float()
        if config.scheduler != "model_default":
            shift = config.flow_shift
            if shift is None:
                shift = model.family.flow_shift(latent_shape, config.num_steps)
            steps = flow_match_schedule if config.scheduler == "flow_match_euler" else stock_flow_match_schedule
            return steps(config.num_steps, shift)
        return model.family.default_schedule(config.num_steps, latent_shape, config.flow_shift)

    def rule(self, model: VelocityModel) -> str | None:
        """Name of the stochastic step rule for the model; None for flow-matching Euler steps."""
        if model.family.prediction == "flow":
            return FLOW_RULES.get(self.config.trajectory)
        config = self.config
        if config.trajectory not in ("ode", "sde") or config.scheduler != "model_default" or config.given is not None:
            raise ConfigError("a DDIM model samples by its own schedule (model_default), with trajectory ode or sde")
        return "ddim"

    def stochastic_steps(self, start: int = 0) -> T:
        """(K) bool: the steps that are drawn. The last step, which reaches sigma 0, is always deterministic."""
        steps, last = torch.arange(self.config.num_steps), self.config.moving_steps - 1
        if not self.config.stochastic:
            return torch.zeros_like(steps, dtype=torch.bool)
        return (steps >= start) & (steps < start + (self.noise.window_size or last)) & (steps < last)

    def say_noise(self, model: VelocityModel, latent_shape: tuple[int, ...]) -> None:
        """Warn where a step that is drawn adds far more noise than there is at sigma 1: later ones leave some of it."""
        if not self.config.stochastic or not collectives.is_rank_0():
            return
        sigmas = self.schedule(model, latent_shape)[1].double()
        nothing, following = torch.zeros_like(sigmas), torch.cat([sigmas[1:], sigmas.new_zeros(1)])
        std = transition(nothing, nothing, sigmas, following, self.noise.noise_level, rule=self.rule(model))[1]
        drawn = sum(self.stochastic_steps(start) for start in window_starts(self.config.moving_steps, self.noise)) > 0
        most, step = std.where(drawn, 0.0).max(dim=0)
        if most > MOST_NOISE:
            logger.warning(
                "the step from sigma %.4g to %.4g adds noise of deviation %.3g, where noise alone has 1: what "
                "is drawn may stay noise. Begin the schedule at sigma 1, or take smaller steps or a lower noise_level",
                sigmas[step], following[step], most,
            )  # fmt: skip

    @torch.no_grad()
    def sample(
        self,
        model: VelocityModel,
        batch: DiffusionBatch,
        *,
        generator: torch.Generator | Sequence[torch.Generator],
        window: int = 0,
        keep: Sequence[int] = (),
    ) -> SamplingResult:
        """Denoise B samples.

        Args:
            model: which predicts.
            batch: conditions and shape of the samples.
            generator: one for each sample, or a single one that seeds one for each sample.
            window: first stochastic step when the noise config has a window_size.
            keep: stochastic steps whose log-probs keep the graph of their own forward, each from the latents on; of the
                others no gradient is recorded.
        """
        generators = _per_sample_generators(generator, batch.batch_size)
        timesteps, sigmas = self.schedule(model, batch.latent_shape)
        if timesteps.shape != sigmas.shape:
            raise ConfigError(f"the schedule has {len(timesteps)} timesteps and {len(sigmas)} sigmas")
        x = self._starting_noise(batch, generators) * model.family.starting_scale(float(sigmas[0]))
        closed = torch.cat([sigmas, sigmas.new_zeros(1)])
        stochastic = self.stochastic_steps(window)
        path, log_probs, means, kept = [x], [], [], []
        for index in range(len(sigmas)):
            at = to_device(timesteps[index].expand(batch.batch_size), x.device)
            moving = index < self.config.moving_steps
            noise = draw_noise(batch.latent_shape, generators, x.dtype, x.device) if stochastic[index] else None
            with torch.set_grad_enabled(index in keep):
                v = model.velocity(x, at, batch.conditions, batch.guidance_scale) if moving else torch.zeros_like(x)
                step = self._advance(model, x, v, closed[index], closed[index + 1], noise)
            if index in keep:
                kept.append(step)
            x = step.prev.detach()
            if self.config.stochastic and self.noise.keep_path:
                path.append(x)
                log_probs.append(step.log_prob.detach())
                if self.noise.keep_means:
                    means.append(step.mean.detach())
        if not path[1:]:
            return SamplingResult(x, timesteps, sigmas)
        all_means = torch.stack(means, dim=1) if self.noise.keep_means else None
        return SamplingResult(
            x, timesteps, sigmas, torch.stack(path, dim=1), torch.stack(log_probs, dim=1), stochastic, all_means,
            _joined(keep, kept),
        )  # fmt: skip

    def _starting_noise(self, batch: DiffusionBatch, generators: list[torch.Generator]) -> T:
        if batch.latents is not None:
            return batch.latents.clone() if batch.latents.dtype == torch.float64 else batch.latents.float().clone()
        device = next((value.device for value in batch.conditions.values()), torch.device("cpu"))
        return draw_noise(batch.latent_shape, generators, torch.float32, device)

    def _advance(self, model: VelocityModel, x: T, v: T, sigma: T, sigma_next: T, noise: T | None) -> Step:
        """The next step; one without noise is deterministic and has log-prob 0."""
        rule = self.rule(model)
        if noise is not None:
            return sde_step(
                x, v, sigma, sigma_next, self.noise.noise_level, rule=rule, noise=noise, reduction=self.noise.log_prob
            )
        if rule == "ddim":
            mean, std = transition(x, upcast(v), sigma, sigma_next, 0.0, rule=rule)
        else:
            mean, std = euler_step(x, v, sigma, sigma_next), per_sample(0.0, x)
        return Step(mean, x.new_zeros(x.shape[0]), mean, std)


@torch.enable_grad()
def _joined(indices: Sequence[int], kept: list[Step]) -> KeptSteps | None:
    if not kept:
        return None
    _, log_probs, means, stds = (torch.cat(values) for values in zip(*kept))
    return KeptSteps(sorted(indices), log_probs, means, stds)


def _per_sample_generators(
    generator: torch.Generator | Sequence[torch.Generator], batch_size: int
) -> list[torch.Generator]:
    if isinstance(generator, torch.Generator):
        seeds = torch.randint(2**62, (batch_size,), generator=generator, device=generator.device).tolist()
        return [torch.Generator().manual_seed(seed) for seed in seeds]
    if len(generator) != batch_size:
        raise ValueError(f"{len(generator)} generators for {batch_size} samples; give one for each")
    return list(generator)
