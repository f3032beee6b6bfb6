"""The configuration of a vision-language run: nested dataclasses, checked on construction.

Leaf names are unique over the tree, so that the flat spelling (``--n_samples_per_prompt 8``) reaches the same field as
``--rollout.n_samples_per_prompt 8`` and ``rollout.n_samples_per_prompt=8``. Names and defaults follow LightRFT and
OpenRLHF where those have them. Lengths are in tokens, learning rates per optimizer step, times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..errors import ConfigError

EMBEDDED = "embedded"

ADVANTAGE_ESTIMATORS = ("gae", "rloo", "reinforce", "reinforce_baseline", "group_norm", "grpo", "dr_grpo", "cpgd")
POLICY_LOSSES = ("ppo", "gspo", "gmpo", "cispo", "cpgd")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3")
TIS_MODES = ("off", "token", "sequence")
ENGINE_TYPES = ("vllm", "hf")


def follow_ema(output: OutputConfig, enable_ema: bool) -> None:
    """What `eval_ema` means where it was not set; ConfigError where there is no average to evaluate."""
    if output.eval_ema is None:
        output.eval_ema = enable_ema
    require(enable_ema or not output.eval_ema, "eval_ema evaluates the EMA weights: add --enable_ema")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def one_of(name: str, value: object, allowed: tuple) -> None:
    require(value in allowed, f"{name} is {value!r}; it must be one of: {', '.join(map(str, allowed))}")


def require_finite(section: Any) -> None:
    """ConfigError for a setting below `section` that is NaN or infinite; what is typed Any is a user's own."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            require_finite(value)
        elif "Any" not in str(item.type):
            numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
            for number in numbers:
                finite = not isinstance(number, float) or math.isfinite(number)
                require(finite, f"{item.name} is {number}; it must be a finite number")


def require_optimizer(adam_betas: Sequence[float], l2: float, max_norm: float) -> None:
    """ConfigError for what AdamW and gradient clipping cannot work with."""
    sound = len(adam_betas) == 2 and all(0 <= beta < 1 for beta in adam_betas)
    require(sound, f"adam_betas is {list(adam_betas)}; it takes two numbers in [0, 1)")
    require(l2 >= 0, f"l2 is {l2}; weight decay must not be negative")
    require(max_norm >= 0, f"max_norm is {max_norm}; it must be positive, or 0 for no clipping")


def mixing_probabilities(text: str | None) -> list[float] | None:
    """prompt_data_probs as numbers, for PromptSampler. Raises ConfigError for anything but numbers."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"prompt_data_probs is {text!r}; use numbers such as 0.7,0.3") from None


def mixing_shares(probabilities: Sequence[float]) -> list[float]:
    """Probabilities (prompt_data_probs) as positive shares of 1. Raises ConfigError where they are none."""
    positive = all(0 < probability < math.inf for probability in probabilities)
    total = sum(probabilities) if positive else 1.0
    shares = [probability / total for probability in probabilities]
    require(
        positive and min(shares, default=1) > 0,  # a share of 0: beside another one it is lost in rounding
        f"mixing probabilities must be positive and of like size: {list(probabilities)} (prompt_data_probs)",
    )
    return shares


@dataclass
class ModelConfig:
    """What is trained. ``pretrain`` is a hub name, a checkpoint folder, or 'embedded' for the built-in tiny model."""

    pretrain: str = EMBEDDED
    critic_pretrain: str | None = None  # default: the actor's checkpoint with a fresh value head
    bf16: bool = False
    attn_implementation: str = "auto"  # auto | sdpa | eager | flash_attention_2
    gradient_checkpointing: bool = False
    freeze_prefix: str = ""  # comma-separated parameter prefixes; 'true' means the vision tower
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    target_modules: str = "all-linear"  # or a comma-separated list of module names
    trust_remote_code: bool = False
    embedded_tie_embeddings: bool = False  # the embedded model with tied input and output embeddings
    embedded_family: str = "qwen2_5_vl"  # qwen2_vl | qwen2_5_vl | qwen3_vl | qwen2 (text only)

    def __post_init__(self) -> None:
        one_of("attn_implementation", self.attn_implementation, ("auto", "sdpa", "eager", "flash_attention_2"))
        one_of("embedded_family", self.embedded_family, ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2"))
        require(self.lora_rank >= 0, f"lora_rank is {self.lora_rank}; 0 turns LoRA off, larger values set its rank")
        require(self.lora_rank == 0 or self.lora_alpha > 0, f"lora_alpha is {self.lora_alpha}; it must be positive")
        require(0 <= self.lora_dropout < 1, f"lora_dropout is {self.lora_dropout}; it must lie in [0, 1)")


@dataclass
class DataConfig:
    """Where prompts come from: jsonl, json, parquet, a Hugging Face data set folder; several, comma-separated."""

    prompt_data: str = EMBEDDED
    prompt_data_probs: str | None = None  # comma-separated mixing probabilities, one per data set
    prompt_split: str = "train"
    eval_data: str | None = None  # default: the embedded held-out split when prompt_data is embedded
    eval_split: str = "test"
    max_samples: int = 100_000_000
    max_eval_samples: int = 500
    input_key: str = "prompt"
    images_key: str = "images"
    videos_key: str = "videos"
    reference_key: str = "reference"
    label_key: str = "label"
    apply_chat_template: bool = True
    system_prompt: str | None = None
    image_root: str | None = None  # folder that relative image paths start from; default: the data file's folder
    on_bad_row: str = "error"  # error | skip (skipped rows are counted and reported)
    on_long_prompt: str = "error"  # error | skip
    allow_remote_media: bool = False  # fetch http(s) images named in rows; private addresses stay refused
    max_image_pixels: int = 50_000_000  # refused before decoding
    min_pixels: int | None = None  # passed to the image processor: images are resized into [min, max] pixels
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        one_of("on_bad_row", self.on_bad_row, ("error", "skip"))
        one_of("on_long_prompt", self.on_long_prompt, ("error", "skip"))
        require(self.max_samples > 0, "max_samples must be positive")
        require(self.max_eval_samples >= 0, "max_eval_samples must not be negative")
        mixing_shares(mixing_probabilities(self.prompt_data_probs) or [])
        for name in ("max_image_pixels", "min_pixels", "max_pixels"):
            pixels = getattr(self, name)
            require(pixels is None or pixels > 0, f"{name} is {pixels}; it must be positive")
        if self.min_pixels is not None and self.max_pixels is not None:
            require(self.min_pixels <= self.max_pixels, "min_pixels must not be above max_pixels")


@dataclass
class RolloutConfig:
    """How responses are sampled, and how many."""

    engine_type: str = "vllm"
    engine_tp_size: int = 1
    engine_mem_util: float = 0.5
    enable_engine_sleep: bool = True  # free the engine's memory while training; CUDA only
    limit_mm_image_per_prompt: int = 10
    limit_mm_video_per_prompt: int = 1
    rollout_batch_size: int = 128  # prompts a step, over all ranks
    micro_rollout_batch_size: int = 8  # samples a forward, per rank
    n_samples_per_prompt: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    prompt_max_len: int = 1024
    generate_max_len: int = 1024
    min_new_tokens: int = 1
    use_fire: bool = False  # first token at first_token_temperature (arXiv 2410.21236)
    first_token_temperature: float = 10.0
    dynamic_sampling: bool = False  # DAPO: resample until the batch holds only groups with different rewards
    dynamic_sampling_max_tries: int = 4
    parity_samples: int = 4  # rollouts re-scored by the trainer after each weight sync; 0 turns the gate off
    parity_tolerance: float | None = None  # default: 1e-4 in fp32 (largest), 0.05 in bf16 (mean over tokens)

    def __post_init__(self) -> None:
        one_of("engine_type", self.engine_type, ENGINE_TYPES)
        for name in (
            "engine_tp_size", "rollout_batch_size", "micro_rollout_batch_size", "n_samples_per_prompt",
            "prompt_max_len", "generate_max_len", "dynamic_sampling_max_tries", "limit_mm_image_per_prompt",
        ):  # fmt: skip
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        require(self.temperature > 0, f"temperature is {self.temperature}; log-probs need a positive temperature")
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]")
        require(self.top_k == -1 or self.top_k > 0, f"top_k is {self.top_k}; use -1 to turn it off")
        require(0 < self.engine_mem_util < 1, f"engine_mem_util is {self.engine_mem_util}; it must lie in (0, 1)")
        require(0 <= self.min_new_tokens <= self.generate_max_len, "min_new_tokens must lie in [0, generate_max_len]")
        require(self.first_token_temperature > 0, "first_token_temperature must be positive")
        require(self.parity_samples >= 0, "parity_samples must not be negative")
        require(self.limit_mm_video_per_prompt >= 0, "limit_mm_video_per_prompt must not be negative")
        tolerance = self.parity_tolerance
        require(tolerance is None or tolerance >= 0, f"parity_tolerance is {tolerance}; it must not be negative")


@dataclass
class RewardConfig:
    """How rollouts are scored; see docs/rewards.md."""

    reward_fn: str | None = None  # path.py:function
    reward_pretrain: str | None = None  # local reward model folders, comma-separated, each optionally name=folder
    remote_rm_url: str | None = None  # URLs, comma-separated, or path.py with reward_func
    components: dict[str, float] = field(default_factory=dict)  # {name: weight}, laid over reward_recipe
    kwargs: dict[str, Any] = field(default_factory=dict)  # {component: {setting: value}}
    reward_recipe: str | None = None  # YAML or JSON file, or inline YAML: {label: [[type, key, weight], ...]}
    reward_wire: str = "lightrft"  # lightrft | openrlhf: JSON form of remote_rm_url
    reward_timeout: float = 60.0  # deadline of one remote call, seconds, retries included
    reward_retries: int = 3  # on connection errors, 429 and 5xx only
    reward_concurrency: int = 32  # remote requests in flight at once
    reward_max_invalid: float = 0.5  # share of invalid scores in one step above which the run stops
    reward_token_env: str | None = None  # environment variable that holds the bearer token of remote rewards
    reward_image_format: str = "png"  # png (lossless) | jpeg
    reward_fn_timeout: float | None = None  # run user callables in a subprocess with this limit, seconds
    reward_transport: str = "inprocess"  # inprocess | ray: where local scorers run
    reward_ray_actors: int = 1  # processes per scorer with reward_transport ray
    reward_cpu_offload: bool = True  # keep local reward models off the accelerator between uses

    def __post_init__(self) -> None:
        one_of("reward_wire", self.reward_wire, ("lightrft", "openrlhf"))
        one_of("reward_image_format", self.reward_image_format, ("png", "jpeg"))
        one_of("reward_transport", self.reward_transport, ("inprocess", "ray"))
        require(self.reward_timeout > 0, "reward_timeout must be positive")
        require(self.reward_retries >= 0, "reward_retries must not be negative")
        require(self.reward_concurrency > 0, "reward_concurrency must be positive")
        require(self.reward_ray_actors > 0, "reward_ray_actors must be positive")
        require(self.reward_fn_timeout is None or self.reward_fn_timeout > 0, "reward_fn_timeout must be positive")
        require(
            not self.kwargs or bool(self.components) or self.reward_recipe is not None,
            "reward.kwargs are settings of reward.components or of the reward_recipe; name one",
        )
        require(0 <= self.reward_max_invalid <= 1, "reward_max_invalid is a share and must lie in [0, 1]")


@dataclass
class AlgorithmConfig:
    """Advantages, losses, KL and reward shaping; formulas and sources in docs/algorithms.md."""

    advantage_estimator: str = "group_norm"
    policy_loss: str = "ppo"
    loss_agg_mode: str = "token-mean"
    eps_clip: float = 0.2
    eps_clip_high: float | None = None  # clip-higher (DAPO); default: eps_clip
    dual_clip: float | None = None  # lower bound factor for negative advantages, > 1
    value_clip: float = 0.2
    gamma: float = 1.0
    lambd: float = 0.95
    init_kl_coef: float = 0.01
    kl_target: float | None = None  # mean KL per token; set: adaptive controller
    kl_horizon: int = 10_000
    kl_estimator: str = "k1"
    use_kl_loss: bool = False  # KL as a loss term instead of in the reward
    entropy_coef: float = 0.0
    high_entropy_token_ratio: float = 1.0  # train on this top share of tokens by entropy (arXiv 2506.01939)
    cpgd_alpha: float = 0.0  # weight of the policy-drift term of the cpgd loss
    tis_mode: str = "off"  # truncated importance sampling for rollout/trainer mismatch
    tis_cap: float = 2.0
    tis_mask: bool = False  # drop tokens (sequences) above the cap instead of truncating their weight
    overlong_buffer: bool = False
    overlong_buffer_len: int = 1024
    overlong_buffer_penalty_factor: float = 1.0
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    reward_clip: float = 0.0  # 0 turns it off; else rewards are clamped into [-reward_clip, reward_clip]
    advantages_norm: bool = False
    advantage_clip: float = 0.0  # 0 turns it off

    def __post_init__(self) -> None:
        one_of("advantage_estimator", self.advantage_estimator, ADVANTAGE_ESTIMATORS)
        one_of("policy_loss", self.policy_loss, POLICY_LOSSES)
        one_of("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        one_of("tis_mode", self.tis_mode, TIS_MODES)
        require(self.eps_clip > 0, "eps_clip must be positive")
        require(self.dual_clip is None or self.dual_clip > 1, "dual_clip must be larger than 1")
        require(0 < self.high_entropy_token_ratio <= 1, "high_entropy_token_ratio must lie in (0, 1]")
        require(0 <= self.gamma <= 1 and 0 <= self.lambd <= 1, "gamma and lambd must lie in [0, 1]")
        require(self.init_kl_coef >= 0, "init_kl_coef must not be negative")
        require(self.tis_cap > 0, "tis_cap must be positive")
        require(self.value_clip >= 0, "value_clip: 0 turns the clip off, else positive")
        require(self.overlong_buffer_len > 0, "overlong_buffer_len must be positive")
        require(self.kl_target is None or self.kl_target > 0, "kl_target must be positive")
        require(self.kl_horizon > 0, "kl_horizon must be positive")
        require(
            self.kl_target is None or self.init_kl_coef > 0,
            "kl_target steers a coefficient that starts at init_kl_coef: at 0 it would stay there",
        )
        require(self.tis_mode != "off" or not self.tis_mask, "tis_mask belongs to --tis_mode token or sequence")
        require(
            self.reward_running_norm or not self.reward_running_norm_minus_mean,
            "reward_running_norm_minus_mean belongs to --reward_running_norm",
        )
        require(self.eps_clip_high is None or self.eps_clip_high > 0, "eps_clip_high must be positive")
        require(
            not (self.use_kl_loss and self.kl_estimator == "k1"),
            "use_kl_loss with kl_estimator k1 has a gradient of expectation 0: use --kl_estimator k2 or k3",
        )
        require(self.reward_clip >= 0 and self.advantage_clip >= 0, "reward_clip and advantage_clip: 0 or positive")
        for name in ("overlong_buffer_penalty_factor", "cpgd_alpha"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass
class TrainConfig:
    """Optimization. Batch sizes count samples over all ranks, micro-batch sizes count samples per rank."""

    train_batch_size: int = 128
    micro_train_batch_size: int = 8
    max_tokens_per_batch: int = 0  # with packing: fill each micro-batch up to this many tokens instead of by count
    packing_samples: bool = False
    num_episodes: int = 1  # passes over the prompt data
    max_epochs: int = 1  # passes over the replay buffer for each rollout
    max_steps: int = -1  # rollout steps; -1: as many as num_episodes gives
    actor_learning_rate: float = 1e-6
    critic_learning_rate: float = 9e-6
    lr_warmup_ratio: float = 0.03
    lr_scheduler: str = "cosine_with_min_lr"  # cosine_with_min_lr | constant_with_warmup | linear
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    l2: float = 0.0
    max_norm: float = 1.0
    freezing_actor_steps: int = -1  # PPO: train the critic alone for this many steps first
    enable_ema: bool = False
    ema_beta: float = 0.992
    max_nonfinite_steps: int = 3  # abort after this many skipped steps in a row
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_train_batch_size", "num_episodes", "max_epochs", "max_nonfinite_steps"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        one_of("lr_scheduler", self.lr_scheduler, ("cosine_with_min_lr", "constant_with_warmup", "linear"))
        require(
            self.max_tokens_per_batch == 0 or (self.max_tokens_per_batch > 0 and self.packing_samples),
            "max_tokens_per_batch is a positive budget of packed batches: add --packing_samples (0 turns it off)",
        )
        require(self.max_steps == -1 or self.max_steps > 0, "max_steps must be positive, or -1 for no limit")
        for name in ("actor_learning_rate", "critic_learning_rate"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")
        require(0 <= self.lr_warmup_ratio <= 1, "lr_warmup_ratio must lie in [0, 1]")
        require_optimizer(self.adam_betas, self.l2, self.max_norm)
        require(0 <= self.ema_beta < 1, "ema_beta must lie in [0, 1)")


@dataclass
class DistributedConfig:
    """DeepSpeed ZeRO and process groups."""

    zero_stage: int = 2
    adam_offload: bool = False
    zpg: int = 1  # ZeRO++ hierarchical partition size
    overlap_comm: bool = False
    grad_accum_dtype: str | None = None  # fp32 | bf16
    sp_size: int = 1
    local_rank: int = -1
    collective_timeout: float = 600.0  # seconds after which a dead or stalled rank ends all ranks

    def __post_init__(self) -> None:
        one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        one_of("grad_accum_dtype", self.grad_accum_dtype, (None, "fp32", "bf16"))
        require(self.sp_size == 1, "sp_size above 1 (sequence parallelism) is not built yet; leave it at 1")
        require(self.zpg >= 1, "zpg must be at least 1")
        require(self.zpg == 1 or self.zero_stage == 3, "zpg belongs to ZeRO stage 3: add --zero_stage 3")
        require(self.collective_timeout > 0, "collective_timeout must be positive")


@dataclass
class OutputConfig:
    """What a run writes, how often, and where it resumes from. Steps are rollout steps."""

    output_dir: str = "outputs/run"
    save_path: str | None = None  # the final model; default: <output_dir>/checkpoint-final
    ckpt_path: str | None = None  # default: <output_dir>
    save_steps: int = -1
    eval_steps: int = -1  # evaluation always runs before the first step and at the end
    logging_steps: int = 1
    max_ckpt_num: int = 3
    load_checkpoint: bool = False  # same as resume_from=auto
    resume_from: str | None = None  # a checkpoint folder, or auto
    best_metric: str | None = None  # column of eval_metrics.csv by which the best checkpoint is kept
    eval_samples_per_prompt: int = 4
    eval_ema: bool | None = None  # evaluate and export the EMA weights; default: with enable_ema
    use_wandb: bool = False
    use_tensorboard: bool = False
    save_trajectories: bool = True
    num_trajectories_to_save: int = 8
    report: bool = True
    run_name: str | None = None

    def __post_init__(self) -> None:
        require(self.logging_steps > 0, "logging_steps must be positive")
        require(self.max_ckpt_num > 0, "max_ckpt_num must be positive")
        require(self.eval_samples_per_prompt > 0, "eval_samples_per_prompt must be positive")
        require(self.num_trajectories_to_save >= 0, "num_trajectories_to_save must not be negative")


@dataclass
class RunConfig:
    """The whole configuration of a vision-language run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require_finite(self)
        algorithm, rollout, train = self.algorithm, self.rollout, self.train
        require(
            algorithm.use_kl_loss is False or algorithm.init_kl_coef > 0,
            "use_kl_loss needs a positive init_kl_coef",
        )
        if algorithm.advantage_estimator in ("rloo", "reinforce_baseline", "group_norm", "grpo", "dr_grpo", "cpgd"):
            require(
                rollout.n_samples_per_prompt > 1,
                f"advantage_estimator {algorithm.advantage_estimator} compares samples of one prompt: "
                f"n_samples_per_prompt is {rollout.n_samples_per_prompt}, it must be at least 2",
            )
        require(
            not (rollout.dynamic_sampling and rollout.n_samples_per_prompt < 2),
            "dynamic_sampling needs n_samples_per_prompt of at least 2",
        )
        require(
            (rollout.rollout_batch_size * rollout.n_samples_per_prompt) % train.train_batch_size == 0,
            f"rollout_batch_size * n_samples_per_prompt = {rollout.rollout_batch_size * rollout.n_samples_per_prompt} "
            f"does not divide into train batches of {train.train_batch_size}",
        )
        require(
            self.train.freezing_actor_steps <= 0 or algorithm.advantage_estimator == "gae",
            "freezing_actor_steps trains the critic alone: it needs advantage_estimator gae",
        )
        require(
            algorithm.tis_mode == "off" or (rollout.top_p == 1 and rollout.top_k == -1),
            "tis_mode compares sampled log-probs, which top_p < 1 or top_k leave undefined: use top_p 1, top_k -1",
        )
        longest = rollout.prompt_max_len + rollout.generate_max_len
        require(
            train.max_tokens_per_batch == 0 or train.max_tokens_per_batch >= longest,
            f"max_tokens_per_batch {train.max_tokens_per_batch} is less than one sample may have: prompt_max_len + "
            f"generate_max_len = {longest}",
        )
        require(
            not algorithm.overlong_buffer or algorithm.overlong_buffer_len < rollout.generate_max_len,
            f"overlong_buffer_len {algorithm.overlong_buffer_len} must be less than generate_max_len "
            f"{rollout.generate_max_len}: every response would be penalised from its first token on",
        )
        require(
            self.model.critic_pretrain is None or algorithm.advantage_estimator == "gae",
            "critic_pretrain is the start of a critic: it needs advantage_estimator gae",
        )
        follow_ema(self.output, train.enable_ema)
