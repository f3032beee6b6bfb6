"""The configuration of a diffusion run; conventions as in schema.py. Names and defaults follow Flow-GRPO and ROLL.

Sizes are in pixels and frames, timesteps of Reward FL are step indices from 0, boundaries are shares of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..batches.diffusion_sampling import NoiseConfig, SamplingConfig, check_noise
from .vl import (
    EMBEDDED,
    DistributedConfig,
    OutputConfig,
    RewardConfig,
    follow_ema,
    one_of,
    require,
    require_finite,
    require_optimizer,
)

DIFFUSION_ALGORITHM_NAMES = ("flow_grpo", "dance_grpo", "diffusion_nft", "ddpo", "dpok", "reward_fl")
SDE_ALGORITHMS = ("flow_grpo", "dance_grpo", "ddpo", "dpok")
TRAJECTORY_OF = {
    "flow_grpo": ("sde", "cps"), "dance_grpo": ("sde_reflow",), "diffusion_nft": ("ode",), "ddpo": ("sde",),
    "dpok": ("sde",), "reward_fl": ("ode",),
}  # fmt: skip
DDIM_ALGORITHMS = ("ddpo", "dpok")
DDIM_FAMILIES = ("sd15",)
USUAL_DEFAULTS = {"num_steps": 10, "learning_rate": 3e-4, "warmup_steps": 0}
DEFAULTS_OF = {"reward_fl": {"num_steps": 8, "learning_rate": 2.5e-6, "warmup_steps": 10}}  # where they differ
FAMILY_NAMES = ("auto", "sd3", "flux", "wan", "wan_i2v", "qwen_image", "cosmos_predict2", "sd15")


def gradient_steps(num_steps: int, first: int, last: int, lowest: float, highest: float) -> list[int]:
    """Steps of Reward FL, counted from 0, whose velocity carries gradient; see algorithms/diffusion/reward_fl.py.

    Those from `first` (mid_timestep) to `last` (final_timestep) whose share step / num_steps lies in [lowest, highest)
    (min_timestep_boundary, max_timestep_boundary). Raises ConfigError where these contradict, or leave no step.
    """
    require(
        0 <= first <= last < num_steps,
        f"steps count from 0: 0 <= mid_timestep {first} <= final_timestep {last} < num_steps {num_steps} must hold",
    )
    require(
        0 <= lowest < highest <= 1,
        f"timestep boundaries are shares of the schedule: 0 <= min_timestep_boundary {lowest} < max_timestep_boundary "
        f"{highest} <= 1 must hold",
    )
    steps = [step for step in range(first, last + 1) if lowest <= step / num_steps < highest]
    require(
        bool(steps),
        f"no step from mid_timestep {first} to final_timestep {last} of {num_steps} lies inside the timestep "
        f"boundaries [{lowest}, {highest})",
    )
    return steps


@dataclass
class DiffusionModelConfig:
    """What is trained: a diffusers pipeline folder, a hub name, or 'embedded' for the built-in tiny SD3 or (family
    sd15) Stable Diffusion 1.5."""

    pretrain: str = EMBEDDED
    family: str = "auto"  # checked against the pipeline's class; auto takes what the pipeline is
    bf16: bool = False
    lora_rank: int = 32  # 0 trains all weights
    lora_alpha: int = 64
    target_modules: str | None = None  # comma-separated module suffixes; default: the attention projections
    trainable_models: str | None = None  # comma-separated denoisers (transformer, transformer_2); default: all
    max_sequence_length: int | None = None  # tokens of the T5 or LLM encoder; default: the family's own
    gradient_checkpointing: bool = False
    use_gradient_checkpointing_offload: bool = False  # keep checkpointed activations in host memory

    def __post_init__(self) -> None:
        one_of("family", self.family, FAMILY_NAMES)
        require(self.lora_rank >= 0, f"lora_rank is {self.lora_rank}; 0 trains all weights")
        require(self.lora_alpha > 0, "lora_alpha must be positive")
        length = self.max_sequence_length
        require(length is None or length > 0, "max_sequence_length must be positive")
        require(
            self.gradient_checkpointing or not self.use_gradient_checkpointing_offload,
            "use_gradient_checkpointing_offload needs gradient_checkpointing",
        )


@dataclass
class DiffusionSamplingConfig:
    """How pictures and videos are drawn in rollouts and in evaluation (always an ODE there)."""

    num_steps: int | None = None  # default: 10, reward_fl 8
    eval_num_steps: int = 40
    scheduler: str = "model_default"  # model_default | flow_match_euler
    trajectory: str | None = None  # ode | sde | sde_reflow | cps; default: the algorithm's
    flow_shift: float | None = None  # of the scheduler's own schedule; timesteps and sigmas are taken as they are
    timesteps: list[float] | None = None  # 1000..0, instead of the scheduler's; num_steps becomes their number
    sigmas: list[float] | None = None  # 1..0, likewise
    noise_level: float = 0.7
    sde_window_size: int = 0  # Flow-GRPO-Fast: this many stochastic steps, the rest by ODE; 0 for no window
    log_prob: str = "mean"  # mean | sum over latent dimensions
    same_latent: bool = False  # all samples of a prompt start from the same noise
    guidance_scale: float = 4.5
    negative_prompt: str = ""
    height: int = 512
    width: int = 512
    num_frames: int = 1
    rollout_batch_size: int = 8  # prompts a step, over all ranks
    n_samples_per_prompt: int = 24
    micro_rollout_batch_size: int = 8  # samples a forward, per rank

    def __post_init__(self) -> None:
        given = self.sigmas or self.timesteps
        if given:
            self.num_steps = len(given)
        require(self.num_steps is None or self.num_steps > 0, f"num_steps is {self.num_steps}; it must be positive")
        for name in (
            "eval_num_steps", "height", "width", "num_frames", "rollout_batch_size", "n_samples_per_prompt",
            "micro_rollout_batch_size",
        ):  # fmt: skip
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        one_of("trajectory", self.trajectory, (None, "ode", "sde", "sde_reflow", "cps"))
        require(self.guidance_scale >= 0, "guidance_scale must not be negative")


@dataclass
class DiffusionDataConfig:
    """Where prompts come from: rows with a prompt and, for image-to-video, a first frame; several files by comma."""

    prompt_data: str = EMBEDDED
    prompt_split: str = "train"
    eval_data: str | None = None  # default: the embedded held-out prompts when prompt_data is embedded
    eval_split: str = "test"
    max_samples: int = 100_000_000
    max_eval_samples: int = 96
    input_key: str = "prompt"
    image_key: str = "input_image"  # first frame of image-to-video models
    label_key: str = "label"
    reference_key: str = "reference"
    image_root: str | None = None
    on_bad_row: str = "error"  # error | skip (skipped rows are counted and reported)

    def __post_init__(self) -> None:
        one_of("on_bad_row", self.on_bad_row, ("error", "skip"))
        require(self.max_samples > 0, "max_samples must be positive")
        require(self.max_eval_samples >= 0, "max_eval_samples must not be negative")


@dataclass
class DiffusionAlgorithmConfig:
    """The loss and its settings; formulas and sources in docs/diffusion.md."""

    diffusion_algorithm: str = "flow_grpo"
    clip_range: float = 1e-4
    adv_clip_max: float = 5.0  # advantages are clamped to ±this; 0 turns the clamp off
    global_std: bool = False  # divide by the std of all rewards instead of the group's
    beta: float = 0.0  # weight of the KL to the reference (flow_grpo, dance_grpo, ddpo, dpok, reward_fl)
    kl_form: str = "full"  # full: s² holds |dt|; published: without
    timestep_fraction: float = 1.0  # first share of the stochastic steps that is trained on
    cfg_in_training: bool = True  # guide the training forward as the rollout was
    grpo_guard: bool = False  # arXiv 2510.22319
    nft_beta: float = 1.0
    nft_kl_beta: float = 1e-4
    decay_type: int = 1  # of DiffusionNFT's old policy: 0, 1 or 2
    adv_mode: str = "all"  # all | positive_only | negative_only | one_only | binary
    mid_timestep: int = 4  # Reward FL: first step with gradient
    final_timestep: int = 7  # Reward FL: last step, from which the data is predicted
    min_timestep_boundary: float = 0.0
    max_timestep_boundary: float = 1.0
    reward_fl_weight: float = 1.0
    score_mean: float = 0.0
    score_std: float = 1.0
    differentiable_reward: str = "shape_match"  # of Reward FL: shape_match, face_similarity, or path.py:function
    differentiable_kwargs: dict[str, Any] = field(default_factory=dict)  # settings of a named one, {setting: value}

    def __post_init__(self) -> None:
        one_of("diffusion_algorithm", self.diffusion_algorithm, DIFFUSION_ALGORITHM_NAMES)
        one_of("kl_form", self.kl_form, ("full", "published"))
        one_of("decay_type", self.decay_type, (0, 1, 2))
        one_of("adv_mode", self.adv_mode, ("all", "positive_only", "negative_only", "one_only", "binary"))
        for name in ("clip_range", "nft_beta", "score_std"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        require(0 < self.timestep_fraction <= 1, "timestep_fraction must lie in (0, 1]")
        require(self.beta >= 0 and self.nft_kl_beta >= 0, "beta and nft_kl_beta must not be negative")
        require(self.adv_clip_max >= 0, "adv_clip_max: 0 or positive")
        require(
            self.diffusion_algorithm != "diffusion_nft" or self.adv_clip_max > 0,
            "diffusion_nft scales advantages by adv_clip_max: it must be positive",
        )
        require(
            not self.grpo_guard or self.diffusion_algorithm in ("flow_grpo", "dance_grpo"),
            "grpo_guard belongs to flow_grpo and dance_grpo",
        )


@dataclass
class DiffusionTrainConfig:
    """Optimization; batch sizes as in schema.py, counted in samples (each with all its trained steps)."""

    train_batch_size: int = 96
    micro_train_batch_size: int = 8
    max_epochs: int = 1
    num_episodes: int = 1
    max_steps: int = -1
    learning_rate: float | None = None  # default: 3e-4, reward_fl 2.5e-6
    warmup_steps: int | None = None  # default: 0, reward_fl 10
    lr_scheduler_type: str = "constant"  # constant | cosine | linear
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    l2: float = 1e-4
    max_norm: float = 1.0
    enable_ema: bool = False
    ema_beta: float = 0.9
    ema_interval: int = 8  # optimizer steps between EMA updates
    max_nonfinite_steps: int = 3
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_train_batch_size", "max_epochs", "num_episodes", "ema_interval",
                     "max_nonfinite_steps"):  # fmt: skip
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        one_of("lr_scheduler_type", self.lr_scheduler_type, ("constant", "cosine", "linear"))
        require(self.max_steps == -1 or self.max_steps > 0, "max_steps must be positive, or -1 for no limit")
        for name, value in (("learning_rate", self.learning_rate), ("warmup_steps", self.warmup_steps)):
            require(value is None or value >= 0, f"{name} is {value}; it must not be negative")
        require_optimizer(self.adam_betas, self.l2, self.max_norm)
        require(0 <= self.ema_beta < 1, "ema_beta must lie in [0, 1)")


@dataclass
class DiffusionRunConfig:
    """The whole configuration of a diffusion run."""

    model: DiffusionModelConfig = field(default_factory=DiffusionModelConfig)
    sampling: DiffusionSamplingConfig = field(default_factory=DiffusionSamplingConfig)
    data: DiffusionDataConfig = field(default_factory=DiffusionDataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: DiffusionAlgorithmConfig = field(default_factory=DiffusionAlgorithmConfig)
    train: DiffusionTrainConfig = field(default_factory=DiffusionTrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require_finite(self)
        self._fill_in_defaults()
        self._check_groups()
        self._check_trajectory()
        self._check_family()
        self._check_schedule()
        sampling = rollout_sampling(self)
        if self.algorithm.diffusion_algorithm == "reward_fl":
            self._check_gradient(sampling.moving_steps)
        check_noise(sampling, rollout_noise(self))
        evaluation_sampling(self)
        follow_ema(self.output, self.train.enable_ema)
        require(
            self.output.eval_samples_per_prompt == OutputConfig.eval_samples_per_prompt,
            "eval_samples_per_prompt belongs to vision-language runs: a diffusion evaluation draws each row of "
            "eval_data once; repeat rows for more",
        )

    @property
    def trajectory(self) -> str:
        return self.sampling.trajectory or TRAJECTORY_OF[self.algorithm.diffusion_algorithm][0]

    def _fill_in_defaults(self) -> None:
        """What neither a recipe nor a flag has set, as the algorithm's own papers and systems have it."""
        usual = USUAL_DEFAULTS | DEFAULTS_OF.get(self.algorithm.diffusion_algorithm, {})
        sampling, train = self.sampling, self.train
        sampling.num_steps = usual["num_steps"] if sampling.num_steps is None else sampling.num_steps
        train.learning_rate = usual["learning_rate"] if train.learning_rate is None else train.learning_rate
        train.warmup_steps = usual["warmup_steps"] if train.warmup_steps is None else train.warmup_steps

    def _check_groups(self) -> None:
        sampling, name = self.sampling, self.algorithm.diffusion_algorithm
        total = sampling.rollout_batch_size * sampling.n_samples_per_prompt
        require(
            total % self.train.train_batch_size == 0,
            f"rollout_batch_size * n_samples_per_prompt = {total} does not divide into train batches of "
            f"{self.train.train_batch_size}",
        )
        require(
            name == "reward_fl" or sampling.n_samples_per_prompt > 1,
            f"{name} compares samples of one prompt: n_samples_per_prompt must be at least 2",
        )

    def _check_family(self) -> None:
        """auto on another path is checked once the pipeline is known; the embedded auto is a flow model."""
        name, family = self.algorithm.diffusion_algorithm, self.model.family
        if family == "auto" and self.model.pretrain != EMBEDDED:
            return
        ddim, listed = name in DDIM_ALGORITHMS, ", ".join(DDIM_FAMILIES)
        require(
            not ddim or family in DDIM_FAMILIES,
            f"{name} trains DDIM models that predict noise, not family {family}; set model.family to: {listed}",
        )
        require(
            ddim or family not in DDIM_FAMILIES,
            f"{name} trains flow models; for family {family} use diffusion_algorithm {' or '.join(DDIM_ALGORITHMS)}",
        )

    def _check_schedule(self) -> None:
        s, name = self.sampling, self.algorithm.diffusion_algorithm
        own = s.scheduler == "model_default" and s.timesteps is None and s.sigmas is None and s.flow_shift is None
        require(
            own or name not in DDIM_ALGORITHMS,
            f"{name} samples by the DDIM model's own schedule: leave scheduler, timesteps, sigmas and flow_shift out",
        )

    def _check_trajectory(self) -> None:
        name = self.algorithm.diffusion_algorithm
        allowed = TRAJECTORY_OF[name]
        listed = " or ".join(allowed)
        require(self.trajectory in allowed, f"{name} samples by trajectory {listed}, not {self.trajectory}")
        if name not in SDE_ALGORITHMS:
            require(self.sampling.sde_window_size == 0, f"sde_window_size belongs to SDE algorithms, not to {name}")

    def _check_gradient(self, moving_steps: int) -> None:
        """Of Reward FL: some step must carry gradient, one of no length carries none."""
        a = self.algorithm
        steps = gradient_steps(
            self.sampling.num_steps, a.mid_timestep, a.final_timestep, a.min_timestep_boundary, a.max_timestep_boundary
        )
        require(
            steps[0] < moving_steps, f"no step from mid_timestep {a.mid_timestep} on has a length: sigma is 0 there"
        )
        require(a.reward_fl_weight != 0, "reward_fl_weight is 0: the reward would not count")


def rollout_sampling(config: DiffusionRunConfig) -> SamplingConfig:
    """Steps and trajectory of rollouts."""
    sampling = config.sampling
    return SamplingConfig(
        num_steps=sampling.num_steps,
        scheduler=sampling.scheduler,
        trajectory=config.trajectory,
        flow_shift=sampling.flow_shift,
        timesteps=sampling.timesteps,
        sigmas=sampling.sigmas,
    )


def evaluation_sampling(config: DiffusionRunConfig) -> SamplingConfig:
    """Steps of evaluation: always an ODE, with a step count of its own, on the scheduler's schedule."""
    sampling = config.sampling
    return SamplingConfig(
        num_steps=sampling.eval_num_steps,
        scheduler=sampling.scheduler,
        trajectory="ode",
        flow_shift=sampling.flow_shift,
    )


def rollout_noise(config: DiffusionRunConfig) -> NoiseConfig:
    """How stochastic steps of rollouts are drawn and scored."""
    return NoiseConfig(
        noise_level=config.sampling.noise_level,
        window_size=config.sampling.sde_window_size,
        log_prob=config.sampling.log_prob,
        keep_means=config.algorithm.grpo_guard,
    )
