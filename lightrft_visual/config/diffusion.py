"""The configuration of a diffusion run; conventions as in vl.py. Names and defaults follow Flow-GRPO and ROLL.

Sizes are in pixels and frames, timesteps of Reward FL are step indices from 0, its boundaries are shares of the noise
schedule's timesteps.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from ..experience.diffusion_sampling import (
    REDUCTIONS,
    SCHEDULERS,
    TRAJECTORIES,
    WINDOW_MOVES,
    NoiseConfig,
    SamplingConfig,
    check_noise,
    first_of_drawn,
    share_of_steps,
)
from . import idle, registry
from .algorithm import DiffusionAlgorithmConfig
from .constraints import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    divisors,
    nearest,
    one_of,
    positive_or,
    registered,
    require,
    settle_update,
    within,
)
from .placement import AsyncConfig
from .shared import (
    ATTENTION,
    AUTO,
    EMBEDDED,
    FULL,
    RECOMPUTES,
    AdamBetas,
    Checkpointing,
    DistributedConfig,
    GuardConfig,
    MaxNorm,
    OutputConfig,
    PlanConfig,
    PromptsConfig,
    RewardConfig,
    WeightDecay,
    accumulated,
)

SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine", "linear": "linear"}
ROLL_DENOISERS = {"dit": "transformer", "dit2": "transformer_2"}
PARTS = ".json"  # how `pretrain` ends where it names the parts of a model
LORA = "pytorch_lora_weights.safetensors"
# Settings by section whose default is the algorithm's.
USUAL = {
    "sampling": ("num_steps", "sde_window_size", "sde_window_move", "same_latent", "n_samples_per_prompt"),
    "algorithm": ("timestep_choice", "clip_range", "beta", "decay_type", "dpo_beta", "min_sigma"),
    "train": ("learning_rate", "warmup_steps"),
}
MEANING = {"flow": "a velocity", "epsilon": "noise (DDIM)"}


def lora_folders(folder: str | Path) -> list[Path]:
    """Where LoRA weights of an export lie: in the folder itself, in one inside for Wan's second expert, or nowhere."""
    return [path for path in (Path(folder), Path(folder, "transformer_2")) if (path / LORA).is_file()]


def gradient_steps(num_steps: int, first: int, last: int) -> list[int]:
    """Steps of Reward FL, counted from 0, whose velocity carries gradient; see algorithms/diffusion/reward_fl.py.

    Args:
        num_steps: denoising steps of a sample.
        first: of these steps (mid_timestep).
        last: of these steps (final_timestep).

    Raises:
        ConfigError: where these contradict.
    """
    require(
        0 <= first <= last < num_steps,
        f"steps count from 0: 0 <= mid_timestep {first} <= final_timestep {last} < num_steps {num_steps} must hold",
    )
    return list(range(first, last + 1))


@dataclass
class DiffusionModelConfig(Section):
    """What is trained: a diffusers pipeline folder, a hub name, a .json file that names the parts of a model, or
    'embedded' for the built-in tiny SD3 or (family sd15) Stable Diffusion 1.5."""

    pretrain: str = EMBEDDED  # hub name, checkpoint folder, or embedded: the tiny model built here
    teacher_pretrain: str | None = None  # of diffusion_opd: a pipeline of the same family, or LoRA weights of this one
    tokenizer_path: str | None = None  # of the text encoder; only for a .json file of parts
    family: Annotated[str, registered(registry.diffusion_families, "auto")] = (
        "auto"  # checked against the pipeline's class; auto takes what the pipeline is
    )
    bf16: bool = False  # weights and forwards in bfloat16; optimizer states in float32
    lora_rank: NonNegativeInt = 32  # 0 trains all weights
    lora_alpha: PositiveInt = 64  # adapters are scaled by lora_alpha / lora_rank
    target_modules: str | None = None  # comma-separated module suffixes; default: the attention projections
    trainable_models: str | None = None  # comma-separated denoisers (transformer, transformer_2); default: all
    max_sequence_length: PositiveInt | None = None  # tokens of the T5 or LLM encoder; default: the family's own
    gradient_checkpointing: Checkpointing = AUTO  # what of blocks runs again in backward; auto: by the plan, on a card
    compile: bool = False  # torch.compile of the denoisers' blocks: slower to start, faster steps
    vae_tiling: bool = False  # decode large images in overlapping tiles: less memory, blended at the seams
    use_gradient_checkpointing_offload: bool = False  # keep checkpointed activations in host memory; checkpoints too

    @property
    def trained_denoisers(self) -> tuple[str, ...] | None:
        """`trainable_models` by the names of diffusers' pipelines; None for all."""
        if self.trainable_models is None:
            return None
        return tuple(ROLL_DENOISERS.get(name, name) for name in map(str.strip, self.trainable_models.split(",")))

    def check(self) -> None:
        """Offloading checkpointed activations checkpoints them; a tokenizer belongs to a model in parts."""
        if self.use_gradient_checkpointing_offload:
            how = self.gradient_checkpointing
            told = f"use_gradient_checkpointing_offload takes gradient_checkpointing full, not {how}: leave one out"
            require(how != ATTENTION, told)
            self.gradient_checkpointing = FULL
        require(
            self.tokenizer_path is None or self.pretrain.endswith(PARTS),
            f"tokenizer_path belongs to a model given as a {PARTS} file of its parts (model_paths); a pipeline folder "
            "has its own tokenizer",
        )


@dataclass
class DiffusionSamplingConfig(Section):
    """How images and videos are drawn in rollouts and in evaluation (always an ODE there)."""

    num_steps: PositiveInt | None = None  # default: 10, reward_fl 8, ddpo and dpok 50
    eval_num_steps: PositiveInt = 40  # denoising steps in evaluation
    scheduler: Annotated[str, one_of(*SCHEDULERS)] = "model_default"
    trajectory: Annotated[str | None, one_of(*TRAJECTORIES)] = None  # default: the algorithm's
    flow_shift: float | None = None  # of the scheduler's own schedule; timesteps and sigmas are taken as they are
    timesteps: list[float] | None = None  # 1000..0, instead of the scheduler's; num_steps becomes their number
    sigmas: list[float] | None = None  # 1..0, likewise
    noise_level: float | None = None  # default: 0.7, dance_grpo 0.3, ddpo and dpok 1; sde_reflow has none
    # this many stochastic steps, the rest by ODE; default: 0, no window; mix_grpo 4, temp_flow_grpo 1
    sde_window_size: NonNegativeInt | None = None
    # default: random, mix_grpo slide, temp_flow_grpo anywhere
    sde_window_move: Annotated[str | None, one_of(*WINDOW_MOVES)] = None
    sde_window_interval: PositiveInt = 25  # slide, cycle: policy steps between moves
    sde_window_stride: PositiveInt = 1  # slide, cycle: denoising steps of a move
    sde_window_range: list[int] | None = None  # first step and end of the steps it lies in; default: 0 and num_steps/2
    log_prob: Annotated[str, one_of(*REDUCTIONS)] = "mean"  # over latent dimensions
    same_latent: bool | None = None  # all samples of a prompt start from the same noise; default: temp_flow_grpo only
    guidance_scale: NonNegativeFloat = 4.5  # of classifier-free guidance; 1: none
    guidance_scale_2: NonNegativeFloat | None = None  # of Wan 2.2's low-noise expert; default: guidance_scale
    negative_prompt: str = ""  # for guidance
    height: PositiveInt = 512  # pixels
    width: PositiveInt = 512  # pixels
    num_frames: PositiveInt = 1  # above 1: videos
    frame_rate: PositiveFloat | None = None  # frames a second of LTX-2's videos, which move by it; default: 24
    source_pixels: PositiveInt | None = None  # area that images to edit are scaled to; default: the pipeline's 1024^2
    rollout_batch_size: PositiveInt = 8  # prompts a step, over all ranks
    n_samples_per_prompt: PositiveInt | None = None  # default: 24, reward_fl and diffusion_opd 1, of pair_data 2
    micro_rollout_batch_size: PositiveInt = 8  # samples a forward, per rank
    # graphs of the denoisers' forwards in rollouts and evaluations: for small images, which the host is slow with
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        given = self.sigmas or self.timesteps
        if given:
            self.num_steps = len(given)
        super().__post_init__()

    def check(self) -> None:
        """A second expert is guided where the first is; a range has two ends."""
        second = self.guidance_scale_2
        require(
            second is None or self.guidance_scale > 1,
            f"guidance_scale {self.guidance_scale} guides no expert: leave guidance_scale_2 {second} out",
        )
        found = self.sde_window_range
        require(found is None or len(found) == 2, f"sde_window_range is {found}; it takes the first step and the end")


@dataclass
class DiffusionDataConfig(PromptsConfig):
    """Where prompts come from: rows with a prompt and, for image-to-video and edits, images; several files by comma."""

    pair_data: str | None = None  # pairs of images for offline diffusion_dpo, in the place of prompts and rollouts
    chosen_key: str = "chosen"  # columns of the pair's images; Pick-a-Pic's are known
    rejected_key: str = "rejected"  # column of the image that was not preferred
    max_eval_samples: NonNegativeInt = 96  # at most so many of each data set are evaluated
    image_key: str = "input_image"  # first frame of image-to-video models, images to edit; else `images`, `image`
    tasks = registry.drawing_tasks


@dataclass
class DiffusionTrainConfig(Section):
    """Optimization; batch sizes as in vl.py, counted in samples (each with all its trained steps)."""

    # samples of an update, over all ranks; 0: all of a rollout; default: 96 (reward_fl 8), or all where that is no part
    train_batch_size: NonNegativeInt | None = None
    groups_per_update: PositiveInt | None = None  # or: prompts whose samples make an update (VRL)
    gradient_accumulation_steps: PositiveInt | None = None  # or: micro-batches of a rank that make an update (ROLL)
    micro_train_batch_size: PositiveInt = 8  # samples of one forward and backward on a rank
    steps_per_forward: PositiveInt = 1  # denoising steps of a micro-batch in one forward; memory grows with it
    # graphs of the rollout's forwards that are kept for its only update, per rank, in place of a replay; larger ones
    # are not kept, 0 keeps none
    rollout_graph_gib: NonNegativeFloat = 1.0
    max_epochs: PositiveInt = 1  # rounds of updates over the samples of a step
    num_episodes: PositiveInt = 1  # as many steps as so many passes over the prompts take; each draws its own at random
    max_steps: Annotated[int, positive_or(-1, "no limit")] = -1  # -1: as many as num_episodes asks for
    learning_rate: NonNegativeFloat | None = None  # default: 3e-4, reward_fl 2.5e-6
    warmup_steps: NonNegativeInt | None = None  # default: 0, reward_fl 10
    lr_scheduler_type: Annotated[str, one_of(*SCHEDULES)] = "constant"
    adam_betas: AdamBetas = field(default_factory=lambda: [0.9, 0.999])  # of AdamW
    l2: WeightDecay = 1e-4  # weight decay
    max_norm: MaxNorm = 1.0  # gradients are clipped to this norm
    enable_ema: bool = False  # an average of the weights is kept, evaluated and saved
    ema_beta: Annotated[float, within("[0, 1)")] = 0.9  # share of the average that each step keeps
    ema_interval: PositiveInt = 8  # optimizer steps between EMA updates
    seed: Annotated[int, within("[0, 9223372036854775807]")] = 42  # of data, sampling and new weights

    def schedule(self, updates: int) -> tuple[str, int]:
        """(scheduler, optimizer steps of warm-up) of a run of `updates` steps."""
        return SCHEDULES[self.lr_scheduler_type], self.warmup_steps or 0


@dataclass
class DiffusionRunConfig(Section):
    """The whole configuration of a diffusion run."""

    model: DiffusionModelConfig = field(default_factory=DiffusionModelConfig)
    sampling: DiffusionSamplingConfig = field(default_factory=DiffusionSamplingConfig)
    data: DiffusionDataConfig = field(default_factory=DiffusionDataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: DiffusionAlgorithmConfig = field(default_factory=DiffusionAlgorithmConfig)
    train: DiffusionTrainConfig = field(default_factory=DiffusionTrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    plugins: str | None = None  # files or modules that add choices of your own, imported first; comma-separated
    kind_of_run: ClassVar[str] = "diffusion"

    def check(self) -> None:
        """What several sections must agree on; what nobody has set is filled in."""
        self._take_pairs()
        self._fill_in_defaults()
        idle.check_any(self)
        idle.check_diffusion(self)
        self._check_coupled()
        self._check_trajectory()
        family, embedded = self.model.family, "flow" if self.model.pretrain == EMBEDDED else None
        self.check_prediction(embedded if family == "auto" else registry.diffusion_families[family].prediction)
        require(
            (self.model.teacher_pretrain is not None) == self.algorithm.entry.teacher,
            "teacher_pretrain names the model that diffusion_algorithm diffusion_opd learns from: give both, or none",
        )
        sampling = rollout_sampling(self)
        if self.algorithm.entry.trains_on == "reward":
            self._check_gradient(sampling.moving_steps)
        else:
            self._check_no_differentiable_reward()
        check_noise(sampling, rollout_noise(self))
        self._check_guidance()
        self.distributed.check_run(self.model, self.train)
        entry, alone = self.algorithm.entry, self.distributed.sp_size == 1
        require(
            not self.sampling.cuda_graphs or (alone and self.distributed.zero_stage < 3),
            "cuda_graphs records forwards of whole weights on one rank: it takes zero_stage 0 to 2, and sp_size 1",
        )
        require(
            alone or not (entry.coupled or entry.trains_on == "reward"),
            f"sp_size shares forwards of losses of single drawn samples, which {entry.name}'s is not: leave it at 1",
        )
        gold = self.guard.gold(self.reward) is not None or self.data.prompt_data in registry.drawing_tasks
        self.guard.check_run(gold, self.data.evaluated, drawn=not self.offline)
        self.output.check_run(self.data, self.train)
        self.distributed.settle()
        self.asynchronous.check_run(self.distributed.split, corrected=False)
        require(not self.asynchronous.partial_rollouts, "partial_rollouts are for responses in text")
        require(
            self.asynchronous.stale_correction != "none",
            "the old log-probs of diffusion runs are always the rollout's: leave stale_correction out",
        )
        require(
            self.output.eval_samples_per_prompt == OutputConfig.eval_samples_per_prompt,
            "eval_samples_per_prompt belongs to vision-language runs: a diffusion evaluation draws each row of "
            "eval_data once; repeat rows for more",
        )

    def updates(self, total_steps: int) -> int:
        """Optimizer steps of a run of `total_steps` rollout steps."""
        samples = self.sampling.rollout_batch_size * self.sampling.n_samples_per_prompt
        return total_steps * self.train.max_epochs * (samples // self.train.train_batch_size)

    @property
    def trajectory(self) -> str:
        """By which rollouts are sampled."""
        return self.sampling.trajectory or self.algorithm.entry.trajectories[0]

    @property
    def only_advantages_count(self) -> bool:
        """Whether a sample of advantage 0 adds nothing to the loss: without a KL, on SDE steps and in preferences.
        Losses of one's own may have terms of all samples."""
        entry = self.algorithm.entry
        serves = entry.trains_on == "steps" or (entry.coupled and not entry.old_policy)
        return bool(serves) and entry.shipped and not entry.teacher and self.algorithm.beta == 0

    @property
    def rollout_graphs_serve(self) -> bool:
        """Whether the forwards of the rollout are those of its update: the only one, of the same weights and guidance,
        on steps that are known before, and with activations that are kept."""
        s, a, train, zero = self.sampling, self.algorithm, self.train, self.distributed
        alike = not self.keeps_old_policy and (a.cfg_in_training or s.guidance_scale <= 1)
        known = a.entry.trains_on == "steps" and (a.timestep_fraction == 1 or a.timestep_choice == "first")
        here = not zero.split and zero.zero_stage < 3 and zero.sp_size == 1
        here = here and self.model.gradient_checkpointing not in RECOMPUTES
        return train.rollout_graph_gib > 0 and self.updates(1) == 1 and alike and known and here

    @property
    def lacks_reward(self) -> bool:
        """Whether prompts are of one's own and nothing scores what is drawn for them. Reward FL, which trains on its
        differentiable reward, and pairs of a file need another one for their evaluation only."""
        unscored = self.offline or self.algorithm.entry.trains_on == "reward"
        builtin = self.data.prompt_data in registry.drawing_tasks
        return not (self.reward.given or builtin) and not (unscored and not self.data.eval_data)

    @property
    def offline(self) -> bool:
        """Whether pairs of a file take the place of rollouts."""
        return self.data.pair_data is not None

    @property
    def silent_moments(self) -> tuple[str, ...]:
        """Those of a hook that the run never calls: pairs are not drawn, and Reward FL replays nothing."""
        if self.offline:
            return "on_prompts", "on_rollouts", "on_scores"
        return ("on_rollouts", "on_buffer", "on_train_batch") if self.algorithm.entry.trains_on == "reward" else ()

    @property
    def keeps_old_policy(self) -> bool:
        """Whether rollouts come from a copy that follows the weights."""
        entry, algorithm = self.algorithm.entry, self.algorithm
        return entry.old_policy or (bool(entry.coupled) and algorithm.dpo_reference == "old")

    @property
    def coupled_samples(self) -> int:
        """Samples whose losses are one term: a pair, or those of a prompt; 1 where each has its own."""
        entry = self.algorithm.entry
        return {"": 1, "pairs": 2, "groups": self.sampling.n_samples_per_prompt}[entry.coupled]

    def _take_pairs(self) -> None:
        """Pairs are the run's data: a step draws rollout_batch_size of them, and by default makes one update."""
        data, sampling = self.data, self.sampling
        if not self.offline:
            return
        name = self.algorithm.diffusion_algorithm
        require(name == "diffusion_dpo", f"pair_data belongs to diffusion_algorithm diffusion_dpo, not to {name}")
        require(
            data.prompt_data in (EMBEDDED, data.pair_data),
            "pair_data takes the place of prompt_data: leave prompt_data out",
        )
        require(
            sampling.n_samples_per_prompt in (None, 2),
            f"a pair is two samples: leave n_samples_per_prompt {sampling.n_samples_per_prompt} out",
        )
        data.prompt_data, sampling.n_samples_per_prompt = data.pair_data, 2
        if self.train.train_batch_size is None and self.train.groups_per_update is None:
            self.train.train_batch_size = 2 * sampling.rollout_batch_size

    def _fill_in_defaults(self) -> None:
        """What neither a recipe nor a flag has set, as the algorithm's own papers and systems have it."""
        usual, sampling, train = self.algorithm.entry, self.sampling, self.train
        if sampling.noise_level is None:
            sampling.noise_level = 1.0 if self.trajectory == "sde_reflow" else usual.noise_level
        for section, names in USUAL.items():
            own = getattr(self, section)
            for name in names:
                if getattr(own, name) is None:
                    setattr(own, name, getattr(usual, name))
        if train.gradient_accumulation_steps is not None:
            train.train_batch_size = accumulated(train.gradient_accumulation_steps, train.micro_train_batch_size)
        settle_update(train, sampling, usual)

    def _check_coupled(self) -> None:
        """Samples that are compared in one term belong to one update, and are compared on finished samples."""
        together, algorithm, n = self.coupled_samples, self.algorithm, self.sampling.n_samples_per_prompt
        size, name = self.train.train_batch_size, algorithm.diffusion_algorithm
        require(
            not algorithm.entry.grouped or n > 1,
            f"{name} compares samples of one prompt: n_samples_per_prompt must be at least 2",
        )
        require(
            size % together == 0,
            f"{name} compares {together} samples in one update: train_batch_size {size} must be a multiple of it, such "
            f"as {nearest(size, divisors(self.sampling.rollout_batch_size * n, together))}",
        )
        if algorithm.entry.coupled != "pairs":
            return
        told = "diffusion_dpo ranks samples by their reward: gdpo scales advantages, which it has none of"
        require(not algorithm.gdpo, told)
        require(n % 2 == 0, f"pairs are made of n_samples_per_prompt samples: {n} must be even")

    def check_prediction(self, found: str | None) -> None:
        """Raise ConfigError for an algorithm, schedule or trajectory that no model which predicts `found` follows;
        None: not known yet."""
        wanted = self.algorithm.entry.prediction
        if None not in (wanted, found):
            fitting = [each.name for each in registry.diffusion_families if each.prediction == wanted]
            others = [each.name for each in registry.diffusion_algorithms if each.prediction in (found, None)]
            require(
                wanted == found,
                f"{self.algorithm.entry.name} trains models that predict {MEANING[wanted]}, and this one "
                f"predicts {MEANING.get(found, found)}: use one of family {', '.join(fitting)}, or diffusion_algorithm "
                f"{' or '.join(others)}",
            )
        if (wanted or found) != "epsilon":
            return
        s, name = self.sampling, self.algorithm.diffusion_algorithm
        require(
            s.scheduler == "model_default" and s.timesteps is None and s.sigmas is None and s.flow_shift is None,
            f"{name} samples by the DDIM model's own schedule: leave scheduler, timesteps, sigmas and flow_shift out",
        )
        told = f"a DDIM model samples by trajectory ode or sde, not {self.trajectory}"
        require(self.trajectory in ("ode", "sde"), told)

    def _check_trajectory(self) -> None:
        algorithm = self.algorithm.entry
        listed = " or ".join(algorithm.trajectories)
        require(
            self.trajectory in algorithm.trajectories,
            f"{algorithm.name} samples by trajectory {listed}, not {self.trajectory}",
        )
        require(
            algorithm.trains_on == "steps" or self.sampling.sde_window_size == 0,
            f"sde_window_size belongs to SDE algorithms, not to {algorithm.name}",
        )
        require(
            self.trajectory != "ode" or not self.sampling.same_latent or self.sampling.n_samples_per_prompt == 1,
            "same_latent with trajectory ode draws one image many times: leave it out, or use a stochastic trajectory",
        )
        require(
            self.trajectory != "sde_reflow" or self.sampling.noise_level == 1,
            f"noise_level is {self.sampling.noise_level}; trajectory sde_reflow has none, as it adds all noise again: "
            "leave it out",
        )
        require(
            not self.algorithm.grpo_guard or self.trajectory != "cps",
            "grpo_guard corrects the log-probs of a Gaussian, and those of trajectory cps are none: use another one",
        )

    def _check_guidance(self) -> None:
        """Steps of the rollout that are compared with the policy's are guided as these are; the first update of a
        rollout compares none, but where the means of its steps are read."""
        s, a, reads_means = self.sampling, self.algorithm, rollout_noise(self).keep_means
        compares = a.entry.shipped and a.entry.trains_on == "steps" and not a.entry.teacher
        first = self.updates(1) == 1 and not self.asynchronous.max_staleness and not reads_means
        total = s.rollout_batch_size * s.n_samples_per_prompt
        one = f", or train_batch_size {total}, max_epochs 1 and max_staleness 0: one update of a rollout compares none"
        require(
            a.cfg_in_training or s.guidance_scale <= 1 or not compares or first,
            f"cfg_in_training false: {a.entry.name} compares steps without guidance with those of a rollout that has "
            f"guidance_scale {s.guidance_scale}; set cfg_in_training true" + ("" if reads_means else one),
        )

    def _check_gradient(self, moving_steps: int) -> None:
        """Of Reward FL: some step must carry gradient, one of no length carries none."""
        a = self.algorithm
        steps = gradient_steps(self.sampling.num_steps, a.mid_timestep, a.final_timestep)
        lowest, highest = a.min_timestep_boundary, a.max_timestep_boundary
        require(
            0 <= lowest < highest <= 1,
            f"timestep boundaries are shares of the schedule: 0 <= min_timestep_boundary {lowest} < "
            f"max_timestep_boundary {highest} <= 1 must hold",
        )
        require(
            steps[0] < moving_steps, f"no step from mid_timestep {a.mid_timestep} on has a length: sigma is 0 there"
        )
        require(a.reward_fl_weight != 0, "reward_fl_weight is 0: the reward would not count")

    def _check_no_differentiable_reward(self) -> None:
        a = self.algorithm
        require(
            a.differentiable_reward is None and not a.differentiable_kwargs,
            "differentiable_reward and its settings (reward_model_path) are what reward_fl trains on, not "
            f"{a.entry.name}: add --diffusion_algorithm reward_fl, or name the reward by --reward_fn, "
            "--reward_pretrain or reward.components.NAME=WEIGHT",
        )


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


def trained_steps(config: DiffusionRunConfig) -> int:
    """Steps of each sample that an update trains on; of losses on data at most, as `min_sigma` may leave some out."""
    algorithm, steps = config.algorithm, rollout_sampling(config).moving_steps
    drawn = config.sampling.sde_window_size or steps - 1
    if algorithm.entry.trains_on == "steps" and algorithm.timestep_choice == "first":
        return first_of_drawn(drawn, algorithm.timestep_fraction)
    return share_of_steps(drawn if algorithm.entry.trains_on == "steps" else steps, algorithm.timestep_fraction)


def evaluation_sampling(config: DiffusionRunConfig) -> SamplingConfig:
    """Steps of evaluation: always an ODE, with a step count of its own, on the scheduler's schedule."""
    steps = config.sampling.eval_num_steps
    return replace(rollout_sampling(config), num_steps=steps, trajectory="ode", timesteps=None, sigmas=None)


def rollout_noise(config: DiffusionRunConfig) -> NoiseConfig:
    """How stochastic steps of rollouts are drawn and scored."""
    within = config.sampling.sde_window_range
    return NoiseConfig(
        noise_level=config.sampling.noise_level,
        window_size=config.sampling.sde_window_size,
        log_prob=config.sampling.log_prob,
        keep_means=config.algorithm.grpo_guard or config.algorithm.entry.keep_means,
        window_range=None if within is None else tuple(within),
        keep_path=config.algorithm.entry.trains_on == "steps",
        window_move=config.sampling.sde_window_move,
        window_interval=config.sampling.sde_window_interval,
        window_stride=config.sampling.sde_window_stride,
    )
