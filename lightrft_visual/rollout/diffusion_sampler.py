"""The diffusion sampler: a thin loop over a velocity model and a noise schedule, apart from any pipeline.

Noise comes from one generator per sample, so a sample does not depend on the batch, the rank or the order of work it
was drawn in. Latents, trajectory and log-probs are fp32 (fp64 latents stay fp64): batch replay then gives the rollout's
log-probs exactly.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from ..errors import ConfigError
from ..strategy.seeding import derive_seed
from .diffusion_steps import REDUCTIONS, Step, euler_step, per_sample, sde_step, transition, upcast

T = torch.Tensor
SCHEDULERS = ("model_default", "flow_match_euler")
TRAJECTORIES = ("ode", "sde", "sde_reflow", "cps")
TRAIN_TIMESTEPS = 1000  # timestep = sigma * TRAIN_TIMESTEPS for flow matching
_FLOW_RULES = {"sde": "flow_grpo", "sde_reflow": "dance", "cps": "cps"}


class VelocityModel(Protocol):
    """What the sampler asks of a model; `lightrft_visual.models.diffusion.policy.DiffusionPolicy` is one.

    prediction: 'flow' (velocity) or 'epsilon' (noise, DDIM). velocity: latents (B, …) and timesteps (B) to (B, …).
    default_schedule: timesteps (K) and sigmas (K) of the model's own scheduler.
    """

    prediction: str

    def velocity(self, latents: T, timesteps: T, conditions: dict[str, T], guidance_scale: float) -> T: ...

    def default_schedule(
        self, num_steps: int, latent_shape: tuple[int, ...], flow_shift: float | None
    ) -> tuple[T, T]: ...


@dataclass(frozen=True)
class SamplingConfig:
    """Steps and kind of trajectory. Raises ConfigError on values that cannot work.

    `timesteps` (1000..0) and `sigmas` (1..0) replace the schedule, and `num_steps` with it, which becomes their length;
    given alone, each implies the other, given together `timesteps` is what the model is told. The closing sigma 0 is
    implied; a last entry 0 is a step of no length.
    """

    num_steps: int = 25
    scheduler: str = "model_default"
    trajectory: str = "ode"
    flow_shift: float | None = None
    timesteps: Sequence[float] | None = None
    sigmas: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"num_steps is {self.num_steps}; it must be positive")
        for name, allowed in (("scheduler", SCHEDULERS), ("trajectory", TRAJECTORIES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of: {', '.join(allowed)}")
        if self.flow_shift is not None and not 0 < self.flow_shift < math.inf:
            raise ConfigError(f"flow_shift is {self.flow_shift}; it must be positive and finite")
        if self.given is not None:
            self._check_schedule()
            object.__setattr__(self, "num_steps", len(self.given))  # frozen: the one place that fills it in

    @property
    def given(self) -> Sequence[float] | None:
        """The schedule that replaces the scheduler's, on either scale."""
        return self.timesteps if self.sigmas is None else self.sigmas

    @property
    def moving_steps(self) -> int:
        """Steps that change the latents: all, but for a last one that starts at 0."""
        return self.num_steps - (self.given is not None and self.given[-1] == 0)

    def _check_schedule(self) -> None:
        if self.timesteps is not None and self.sigmas is not None and len(self.timesteps) != len(self.sigmas):
            raise ConfigError(
                f"timesteps has {len(self.timesteps)} entries, sigmas {len(self.sigmas)}; they must have equal length"
            )
        for name, top in (("timesteps", TRAIN_TIMESTEPS), ("sigmas", 1)):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) == 0:
                raise ConfigError(f"{name} is empty; leave it out for the scheduler's own schedule")
            if not all(math.isfinite(value) for value in values):
                raise ConfigError(f"{name} must hold finite numbers")
            if min(values) < 0 or max(values) > top:
                raise ConfigError(f"{name} must lie in 0 to {top}, from noise down to data; found {list(values)}")
            if any(later > earlier for earlier, later in zip(values, values[1:])):
                raise ConfigError(f"{name} must not rise: steps go from noise down to data")
        name, given = "timesteps" if self.sigmas is None else "sigmas", self.given
        if any(later == earlier for earlier, later in zip(given, given[1:])):
            raise ConfigError(f"{name} must fall strictly: a step between equal values would have no length")
        if given[0] == 0:
            raise ConfigError(f"{name} begins at 0, where there is nothing to denoise")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingConfig:
        """From a parsed YAML section; an unknown key raises ConfigError with the nearest name."""
        known = [item.name for item in fields(cls)]
        for key in mapping:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise ConfigError(f"sampling has no field {key!r}; did you mean {near!r}?")
        return cls(**mapping)

    @property
    def stochastic(self) -> bool:
        return self.trajectory != "ode"


@dataclass(frozen=True)
class NoiseConfig:
    """How stochastic steps are drawn and scored.

    noise_level: see `sde_step`. window_size: number of consecutive stochastic steps, the others follow the ODE
    (Flow-GRPO-Fast); 0 means every step but the last. log_prob: mean or sum over latent dimensions. keep_means: also
    return the mean of every step, which GRPO-Guard compares with (as much memory as the trajectory).
    """

    noise_level: float = 0.7
    window_size: int = 0
    log_prob: str = "mean"
    keep_means: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < math.inf:
            raise ConfigError(f"noise_level is {self.noise_level}; it must be finite and not negative")
        if self.window_size < 0:
            raise ConfigError(f"window_size is {self.window_size}; use 0 for no window")
        if self.log_prob not in REDUCTIONS:
            raise ConfigError(f"log_prob is {self.log_prob!r}; it must be one of: {', '.join(REDUCTIONS)}")


@dataclass
class DiffusionBatch:
    """What one call of the sampler draws: B samples. The sampler leaves it as it was.

    conditions: tensors whose first axis is B, as `DiffusionPolicy.encode_prompts` returns them. latent_shape: of one
    sample, without B. latents (B, *latent_shape): the starting noise; None draws it from the generators.
    """

    conditions: dict[str, T]
    latent_shape: tuple[int, ...]
    batch_size: int
    guidance_scale: float = 1.0
    latents: T | None = None


@dataclass
class SamplingResult:
    """latents (B, …) at sigma 0; timesteps, sigmas (K), equal in length (the closing sigma 0 is implied).

    With a stochastic trajectory also: trajectory (B, K+1, …); log_probs (B, K), 0 on deterministic steps;
    stochastic (K) bool, true on the steps that were drawn and have a log-prob; means (B, K, …) if they were kept.
    """

    latents: T
    timesteps: T
    sigmas: T
    trajectory: T | None = None
    log_probs: T | None = None
    stochastic: T | None = None
    means: T | None = None


def sample_generators(
    run_seed: int, step: int, indices: Sequence[int], purpose: str = "noise"
) -> list[torch.Generator]:
    """One CPU generator per sample, seeded by (run seed, purpose, policy step, global index) and nothing else."""
    return [torch.Generator().manual_seed(derive_seed(run_seed, purpose, step, int(index))) for index in indices]


def draw_noise(
    shape: tuple[int, ...], generators: Sequence[torch.Generator], dtype: torch.dtype, device: torch.device
) -> T:
    """(B, *shape) unit normal, row i from generator i, drawn on the generator's device."""
    rows = [torch.randn(shape, generator=generator, dtype=dtype, device=generator.device) for generator in generators]
    return torch.stack(rows).to(device)


def flow_match_schedule(num_steps: int, shift: float = 1.0) -> tuple[T, T]:
    """Timesteps (K) and sigmas (K) from 1 to 1/K, evenly spaced and then shifted: s -> shift s / (1 + (shift-1) s)."""
    sigmas = torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return (sigmas * TRAIN_TIMESTEPS).float(), sigmas.float()


def window_start(num_steps: int, window_size: int, seed: int) -> int:
    """First stochastic step of a window in the first half of the steps, drawn from the seed (Flow-GRPO-Fast)."""
    latest = max(0, min(num_steps // 2, num_steps - 1 - window_size))
    return int(torch.randint(latest + 1, (1,), generator=torch.Generator().manual_seed(seed)))


class DiffusionSampler:
    """Draws samples by one SamplingConfig; see `sample`. Raises ConfigError where trajectory and noise do not fit."""

    def __init__(self, config: SamplingConfig, noise: NoiseConfig | None = None) -> None:
        self.config = config
        self.noise = noise or NoiseConfig()
        if not config.stochastic:
            return
        if self.noise.noise_level == 0:
            raise ConfigError(
                f"noise_level is 0 with trajectory {config.trajectory!r}: its log-probs are undefined; "
                "set a positive noise_level, or trajectory ode"
            )
        if config.trajectory == "cps" and self.noise.noise_level >= 2:
            raise ConfigError(
                f"noise_level is {self.noise.noise_level}; trajectory cps needs it below 2: "
                "its spread is sin(noise_level pi / 2)"
            )
        if config.moving_steps < 2:
            raise ConfigError("a stochastic trajectory needs num_steps of at least 2: the last step is deterministic")
        if self.noise.window_size >= config.moving_steps:
            raise ConfigError(f"window_size {self.noise.window_size} leaves no deterministic last step")

    def schedule(self, model: VelocityModel, latent_shape: tuple[int, ...]) -> tuple[T, T]:
        """Timesteps (K) and sigmas (K), fp32 on the CPU."""
        config = self.config
        if config.given is not None:
            given = config.sigmas if config.sigmas is not None else [t / TRAIN_TIMESTEPS for t in config.timesteps]
            sigmas = torch.tensor(given, dtype=torch.float64)
            timesteps = sigmas * TRAIN_TIMESTEPS if config.timesteps is None else torch.tensor(config.timesteps)
            return timesteps.float(), sigmas.float()
        if config.scheduler == "flow_match_euler":
            return flow_match_schedule(config.num_steps, config.flow_shift or 1.0)
        return model.default_schedule(config.num_steps, latent_shape, config.flow_shift)

    def rule(self, model: VelocityModel) -> str | None:
        """Name of the stochastic step rule for the model; None for flow-matching Euler steps."""
        if model.prediction == "flow":
            return _FLOW_RULES.get(self.config.trajectory)
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

    @torch.no_grad()
    def sample(
        self,
        model: VelocityModel,
        batch: DiffusionBatch,
        *,
        generator: torch.Generator | Sequence[torch.Generator],
        window: int = 0,
    ) -> SamplingResult:
        """Denoise B samples. generator: one for each sample, or a single one that seeds one for each sample.

        window: first stochastic step when the noise config has a window_size. No gradient is recorded.
        """
        generators = _per_sample_generators(generator, batch.batch_size)
        timesteps, sigmas = self.schedule(model, batch.latent_shape)
        if timesteps.shape != sigmas.shape:
            raise ConfigError(f"the schedule has {len(timesteps)} timesteps and {len(sigmas)} sigmas")
        x = self._starting_noise(model, batch, generators)
        closed = torch.cat([sigmas, sigmas.new_zeros(1)])
        stochastic = self.stochastic_steps(window)
        path, log_probs, means = [x], [], []
        for index in range(len(sigmas)):
            at = timesteps[index].expand(batch.batch_size).to(x.device)
            moving = index < self.config.moving_steps
            v = model.velocity(x, at, batch.conditions, batch.guidance_scale) if moving else torch.zeros_like(x)
            noise = draw_noise(batch.latent_shape, generators, x.dtype, x.device) if stochastic[index] else None
            step = self._advance(model, x, v, closed[index], closed[index + 1], noise)
            x = step.prev
            if self.config.stochastic:
                path.append(x)
                log_probs.append(step.log_prob)
                means.append(step.mean)
        if not self.config.stochastic:
            return SamplingResult(x, timesteps, sigmas)
        kept = torch.stack(means, dim=1) if self.noise.keep_means else None
        return SamplingResult(
            x, timesteps, sigmas, torch.stack(path, dim=1), torch.stack(log_probs, dim=1), stochastic, kept
        )

    def _starting_noise(self, model: VelocityModel, batch: DiffusionBatch, generators: list[torch.Generator]) -> T:
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


def _per_sample_generators(
    generator: torch.Generator | Sequence[torch.Generator], batch_size: int
) -> list[torch.Generator]:
    if isinstance(generator, torch.Generator):
        seeds = torch.randint(2**62, (batch_size,), generator=generator, device=generator.device).tolist()
        return [torch.Generator().manual_seed(seed) for seed in seeds]
    if len(generator) != batch_size:
        raise ValueError(f"{len(generator)} generators for {batch_size} samples; give one for each")
    return list(generator)
