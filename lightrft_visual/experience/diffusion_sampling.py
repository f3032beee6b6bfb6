"""What the diffusion sampler is asked for and answers. Free of torch at import, so that settings are checked early."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor as T


REDUCTIONS = ("mean", "sum")
SCHEDULERS = ("model_default", "flow_match_euler", "flow_match_euler_stock")

TRAJECTORIES = ("ode", "sde", "sde_reflow", "dance", "cps")

WINDOW_MOVES = ("random", "anywhere", "slide", "cycle")

TRAIN_TIMESTEPS = 1000  # timestep = sigma * TRAIN_TIMESTEPS for flow matching


def share_of_steps(count: int, fraction: float) -> int:
    """Steps that `timestep_fraction` keeps of `count`: cut, as Flow-GRPO, DanceGRPO, DiffusionNFT and FastVideo do, and
    at least one."""
    return max(1, int(fraction * count))


def first_of_drawn(count: int, fraction: float) -> int:
    """The same of `count` steps that were drawn: the deterministic one behind them is a step of the schedule too."""
    return min(count, share_of_steps(count + 1, fraction))


def _field_value(name: str, value: Any) -> Any:
    """A field of `SamplingConfig` in its own type."""
    if name in ("scheduler", "trajectory"):
        return str(value).strip().lower()
    if name == "flow_shift" and isinstance(value, str) and value == "inherit":
        return None
    several = name in ("timesteps", "sigmas")
    try:
        listed = hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)
        listed = listed and getattr(value, "ndim", 1) > 0  # arrays and tensors without an axis are numbers
        if several != listed or isinstance(value, bool):
            raise ValueError
        if several:
            return [float(each) for each in value]
        if name == "num_steps" and int(value) != float(value):
            raise ValueError
        return int(value) if name == "num_steps" else float(value)
    except (TypeError, ValueError, OverflowError):
        what = "a list of numbers" if several else "a whole number" if name == "num_steps" else "a number, or 'inherit'"
        raise ConfigError(f"{name} is {value!r}; it must be {what}") from None


@dataclass(frozen=True)
class SamplingConfig:
    """Steps and kind of trajectory. Raises ConfigError on values that cannot work.

    `timesteps` (1000..0) and `sigmas` (1..0) replace the schedule, and `num_steps` with it, which becomes their length;
    given alone, each implies the other, given together `timesteps` is what the model is told. The closing sigma 0 is
    implied; a last entry 0 is a step of no length. A flow_shift of None or 'inherit' is the model's own.
    """

    num_steps: int = 25
    scheduler: str = "model_default"
    trajectory: str = "ode"
    flow_shift: float | None = None
    timesteps: Sequence[float] | None = None
    sigmas: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:  # frozen: filled in here, as num_steps is below
                object.__setattr__(self, item.name, _field_value(item.name, value))
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
            object.__setattr__(self, "num_steps", len(self.given))

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
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> SamplingConfig:
        """From a parsed YAML section, as FastVideo reads it: None is the default of a field, or of all; numbers may be
        texts. Raises ConfigError for any other value, and for an unknown key with the nearest name."""
        if not isinstance(mapping, Mapping | None):
            raise ConfigError(f"sampling is a {type(mapping).__name__}; it must be a mapping of field to value")
        known = [item.name for item in fields(cls)]
        for key in mapping or {}:
            if key not in known:
                raise ConfigError(f"sampling has no field {key!r}{did_you_mean(str(key), known)}")
        given = {key: value for key, value in (mapping or {}).items() if not isinstance(value, str | None) or value}
        return cls(**given)

    @property
    def stochastic(self) -> bool:
        """Whether steps are drawn, and so have log-probs."""
        return self.trajectory != "ode"


@dataclass(frozen=True)
class NoiseConfig:
    """How stochastic steps are drawn and scored.

    noise_level: see `sde_step`. window_size: number of consecutive stochastic steps, the others follow the ODE
    (Flow-GRPO-Fast); 0 means every step but the last. window_range: first step and end of the steps that the window
    lies in; None is the first half for random moves, else all but the last. window_move, window_interval,
    window_stride: where it lies at a policy step, see `window_start`. log_prob: mean or sum over latent dimensions.
    keep_means: also return the mean of every step, which GRPO-Guard and Flow-DPPO compare with (as much memory as the
    trajectory). keep_path: return the trajectory; a loss on finished samples has no use for it.
    """

    noise_level: float = 0.7
    window_size: int = 0
    log_prob: str = "mean"
    keep_means: bool = False
    window_range: tuple[int, int] | None = None
    keep_path: bool = True
    window_move: str = "random"
    window_interval: int = 25
    window_stride: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < math.inf:
            raise ConfigError(f"noise_level is {self.noise_level}; it must be finite and not negative")


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
class KeptSteps:
    """Steps of B samples with the graph of the forwards that drew them.

    steps: their n indices; log_probs (n * B), means (n * B, …), stds (n * B, 1, …): of all samples at the first of the
    steps, and so on.
    """

    steps: list[int]
    log_probs: T
    means: T
    stds: T


@dataclass
class SamplingResult:
    """latents (B, …) at sigma 0; timesteps, sigmas (K), equal in length (the closing sigma 0 is implied).

    With a stochastic trajectory also: trajectory (B, K+1, …); log_probs (B, K), 0 on deterministic steps;
    stochastic (K) bool, true on the steps that were drawn and have a log-prob; means (B, K, …) if they were kept;
    kept: the steps whose graph was.
    """

    latents: T
    timesteps: T
    sigmas: T
    trajectory: T | None = None
    log_probs: T | None = None
    stochastic: T | None = None
    means: T | None = None
    kept: KeptSteps | None = None


def check_noise(config: SamplingConfig, noise: NoiseConfig) -> None:
    """Raise ConfigError where the trajectory and the noise settings do not fit each other."""
    if not config.stochastic:
        return
    if noise.noise_level == 0:
        raise ConfigError(
            f"noise_level is 0 with trajectory {config.trajectory!r}: its log-probs are undefined; "
            "set a positive noise_level, or trajectory ode"
        )
    if config.trajectory == "cps" and noise.noise_level >= 2:
        raise ConfigError(
            f"noise_level is {noise.noise_level}; trajectory cps needs it below 2: "
            "its standard deviation is sin(noise_level pi / 2)"
        )
    if config.moving_steps < 2:
        raise ConfigError("a stochastic trajectory needs num_steps of at least 2: the last step is deterministic")
    if noise.window_size >= config.moving_steps:
        raise ConfigError(f"sde_window_size {noise.window_size} must be below num_steps {config.num_steps}")
    if noise.window_range is not None:
        _check_window(noise.window_size, *noise.window_range, config.moving_steps)


def _check_window(size: int, start: int, end: int, steps: int) -> None:
    if size == 0:
        raise ConfigError("sde_window_range is where the window lies: set sde_window_size too")
    if not (0 <= start and start + size <= end < steps):
        raise ConfigError(
            f"a window of {size} steps does not fit into steps {start} to {end} (without the end): of {steps} steps "
            "the last is deterministic"
        )
