"""The configuration of a vision-language run: nested dataclasses, checked on construction.

Leaf names are unique over the tree, so that the flat spelling (``--n_samples_per_prompt 8``) reaches the same field as
``--rollout.n_samples_per_prompt 8`` and ``rollout.n_samples_per_prompt=8``. Names and most defaults follow LightRFT
and OpenRLHF (docs/coming_from.md). Lengths are in tokens, learning rates per optimizer step, times in seconds.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from ..errors import ConfigError
from . import idle, registry
from .algorithm import AlgorithmConfig
from .constraints import (
    Constraint,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    one_of,
    positive_or,
    registered,
    require,
    said,
    settle_update,
    within,
)
from .environment import EpisodeConfig
from .placement import AsyncConfig
from .shared import (
    ATTENTION,
    AUTO,
    EMBEDDED,
    AdamBetas,
    BadRows,
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

SamplingTemperature = Constraint(lambda value: value > 0, "log-probs need a positive one; eval_reward_greedy is greedy")


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


# transformers' names. A kernel of the hub is FlashAttention too, which finds the samples of a packed batch by itself.
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
_attention = Constraint(
    lambda value: value in ATTENTIONS or re.fullmatch(r"[^/:]+/[^/:]*flash[^/:]*(:[^/:]+)?", str(value)) is not None,
    f"it must be one of: {', '.join(ATTENTIONS)}, or FlashAttention of the hub, such as kernels-community/flash-attn3",
    ATTENTIONS,
)


@dataclass
class ModelConfig(Section):
    """What is trained. ``pretrain`` is a hub name, a checkpoint folder, or 'embedded' for the built-in tiny model."""

    pretrain: str = EMBEDDED  # hub name, checkpoint folder, or embedded: the tiny model built here
    critic_pretrain: str | None = None  # default: the actor's checkpoint with a fresh value head
    teacher_pretrain: str | None = None  # on-policy distillation: a model of the same tokens, often a larger one
    bf16: bool = False  # weights and forwards in bfloat16; optimizer states in float32
    attn_implementation: Annotated[str, _attention] = "auto"
    compile: bool = False  # torch.compile of the blocks of trained models: slower to start, fewer kernels a step
    use_liger_kernel: bool = False  # Liger's Triton kernels for norms, gated MLPs and rotary positions: fewer a step
    gradient_checkpointing: Checkpointing = AUTO  # what of blocks runs again in backward; auto: by the plan, on a card
    freeze_prefix: str = ""  # comma-separated parameter prefixes; 'true' is the vision tower, Qwen's merger in it
    lora_rank: NonNegativeInt = 0  # 0 trains all weights
    lora_alpha: int = 16  # adapters are scaled by lora_alpha / lora_rank
    lora_dropout: Annotated[float, within("[0, 1)")] = 0.0  # share of the adapters' inputs that training drops
    target_modules: str = "all-linear"  # or a comma-separated list of module names
    target_parameters: str = ""  # LoRA on experts: comma-separated, such as experts.gate_up_proj,experts.down_proj
    trust_remote_code: bool = False  # run Python files that come with the checkpoint
    # qwen2 reads text only; janus also draws, by engine hf
    embedded_family: Annotated[str, one_of("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen2", "janus")] = (
        "qwen2_5_vl"
    )

    def check(self) -> None:
        """LoRA's scale, and what it adapts; attention that can be kept; one way to fewer kernels."""
        self.critic_pretrain = self.critic_pretrain or None
        kept = self.gradient_checkpointing != ATTENTION or self.attn_implementation != "eager"
        require(not (self.compile and self.use_liger_kernel), "compile and use_liger_kernel do the same: leave one out")
        require(kept, "gradient_checkpointing attention keeps one operation's result, and eager attention has several")
        require(self.lora_rank == 0 or self.lora_alpha > 0, f"lora_alpha is {self.lora_alpha}; it must be positive")
        adapts = not self.target_parameters or (self.lora_rank > 0 and self.lora_dropout == 0)
        require(adapts, "target_parameters needs a lora_rank above 0 and a lora_dropout of 0")


@dataclass
class DataConfig(PromptsConfig):
    """Where prompts come from: jsonl, json, parquet, a Hugging Face data set folder; several, comma-separated."""

    prompt_data_probs: str | None = None  # comma-separated mixing probabilities, one per data set
    # each batch of rows in any order, with an even share of every data set, or of one data set in turns
    prompt_mixing: Annotated[str, one_of("shuffled", "even", "turns")] = "shuffled"
    images_key: str = "images"  # empty: no images are read
    videos_key: str = "videos"  # empty: no videos are read
    draw_key: str = "draw"  # a column that is true in rows to be answered by an image
    apply_chat_template: bool = True  # prompts are messages of the model's chat template
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # what it reads besides, such as enable_thinking
    system_prompt: str | None = None  # put before each prompt that has none
    data_format: Annotated[str, registered(registry.row_forms, "auto", "plain")] = (
        "auto"  # of the rows, see docs/coming_from.md
    )
    on_long_prompt: BadRows = "error"
    allow_remote_media: bool = False  # fetch http(s) images named in rows; private addresses stay refused
    max_image_pixels: PositiveInt = 50_000_000  # refused before decoding
    min_pixels: PositiveInt | None = None  # passed to the image processor: images are resized into [min, max] pixels
    max_pixels: PositiveInt | None = None  # larger images are made smaller; default: the processor's
    tasks = registry.tasks

    def check(self) -> None:
        """Mixing probabilities, what a chat template reads, and the order of the sizes."""
        shares = mixing_shares(mixing_probabilities(self.prompt_data_probs) or [])
        sets = sum(1 for part in self.prompt_data.split(",") if part.strip())
        fits = len(shares) in (0, sets)
        require(fits, f"{len(shares)} mixing probabilities for {sets} data sets (prompt_data_probs)")
        super().check()
        for name in ("system_prompt", "chat_template_kwargs"):
            told = f"{name} does nothing with apply_chat_template false: leave it out"
            require(self.apply_chat_template or not getattr(self, name), told)
        if self.min_pixels is not None and self.max_pixels is not None:
            require(self.min_pixels <= self.max_pixels, "min_pixels must not be above max_pixels")


@dataclass
class RolloutConfig(Section):
    """How responses are sampled, and how many."""

    engine_type: Annotated[str, registered(registry.engines)] = "vllm"
    engine_tp_size: PositiveInt = 1  # devices that share one engine
    engine_mem_util: Annotated[float, within("(0, 1)")] = 0.5  # share of the device's memory that the engine may fill
    enable_engine_sleep: bool = True  # free the engine's memory while training; CUDA only
    engine_enforce_eager: bool | None = None  # vLLM without CUDA graphs and compiled layers; None: on CPU hosts only
    engine_max_num_seqs: PositiveInt | None = None  # sequences in flight; default: all samples of a step, at most 256
    engine_max_num_batched_tokens: PositiveInt | None = None  # of one forward; default: 8192 or one whole sequence
    engine_kv_cache_dtype: str = "auto"  # vLLM's names, such as fp8
    engine_quantization: str | None = None  # vLLM's names, such as fp8: weights are quantised as loaded
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # other engine arguments by vLLM's names
    offload_trainer: bool = False  # optimizer states, gradients and weights wait on the host while they are not used
    offload_reference: bool = False  # the reference model's weights are on the device for its forwards only
    limit_mm_image_per_prompt: PositiveInt = 10  # images that the engine takes in one prompt
    limit_mm_video_per_prompt: NonNegativeInt = 1  # videos that the engine takes in one prompt
    rollout_batch_size: PositiveInt = 128  # prompts a step, over all ranks
    micro_rollout_batch_size: PositiveInt = 8  # samples a forward, per rank
    n_samples_per_prompt: PositiveInt = 8  # responses of a prompt: the size of a group
    temperature: Annotated[float, SamplingTemperature] = 1.0  # of sampling, and of the log-probs that are trained
    top_p: Annotated[float, within("(0, 1]")] = 1.0  # tokens are sampled among the likeliest of this probability
    top_k: Annotated[int, positive_or(-1, "all tokens")] = -1  # tokens are sampled among so many likeliest
    prompt_max_len: PositiveInt = 1024  # tokens of a prompt, image tokens included
    generate_max_len: PositiveInt = 1024  # tokens of a response
    min_new_tokens: NonNegativeInt = 1  # tokens before the end token; 1 is as 0: an end token alone is a response
    use_fire: bool = False  # first token at first_token_temperature (arXiv 2410.21236)
    first_token_temperature: PositiveFloat = 10.0  # of the first token, with use_fire
    guidance_scale: PositiveFloat = 1.0  # classifier-free guidance of drawn images; 1 is none
    # of drawn tokens: of what they are drawn from, or of the prompt alone (one forward pass less to train on)
    guidance_log_probs: Annotated[str, one_of("guided", "conditional")] = "guided"
    noisy_rollout_share: Annotated[float, within("[0, 1)")] = 0.0  # of a prompt's responses, from a noisy image
    noisy_rollout_strength: Annotated[int, within("[1, 999]")] = 500  # of the noise at first: a step of 1,000
    balance_rollouts: bool = False  # ranks generate for each other, by the length that responses are expected to have
    dynamic_sampling: bool = False  # DAPO: resample until the batch holds only groups with different rewards
    dynamic_sampling_max_tries: PositiveInt = 4  # rollouts of a step at most; 1: none is drawn again
    parity_every: NonNegativeInt = 50  # steps between the gate's probes; rollouts are compared as they come. 0: no gate
    image_dependence_every: NonNegativeInt = 10  # steps between measurements of what depends on the image; 0: none
    parity_tolerance: NonNegativeFloat | None = None  # default: 1e-4 in fp32 (largest); means: 0.05 in bf16, 0.3 in fp8

    @property
    def coarse(self) -> bool:
        """Whether the engine computes in fewer bits than the trainer: then every token's log-prob differs."""
        return self.engine_quantization is not None or self.engine_kv_cache_dtype.startswith("fp8")

    def check(self) -> None:
        """Lengths, what the engine can do, and shares that leave nothing."""
        samples = self.n_samples_per_prompt
        require(
            self.min_new_tokens <= self.generate_max_len,
            f"min_new_tokens {self.min_new_tokens} is above generate_max_len {self.generate_max_len}",
        )
        require(
            self.engine_tp_size == 1 or registry.engines[self.engine_type].tensor_parallel,
            f"engine_tp_size is {self.engine_tp_size}, but engine {self.engine_type} runs on one rank",
        )
        require(
            self.noisy_rollout_share == 0 or 0 < round(self.noisy_rollout_share * samples) < samples,
            f"noisy_rollout_share {self.noisy_rollout_share} of {samples} samples leaves none with, or none without a "
            "noisy image",
        )


@dataclass
class TrainConfig(Section):
    """Optimization. Batch sizes count samples over all ranks, micro-batch sizes count samples per rank."""

    train_batch_size: NonNegativeInt = 0  # samples of an update; 0: all of a rollout
    groups_per_update: PositiveInt | None = None  # or: prompts whose samples make an update (verl)
    gradient_accumulation_steps: PositiveInt | None = None  # or: micro-batches of a rank that make an update (TRL)
    micro_train_batch_size: PositiveInt = 8  # samples of one forward and backward on a rank
    max_tokens_per_batch: int = 0  # with packing: fill each micro-batch up to this many tokens instead of by count
    packing_samples: bool = False  # samples of a micro-batch lie in one sequence without padding
    # compute a prompt once for its samples; default: where the model is shown to train equally
    share_prefix: bool | None = None
    num_episodes: PositiveInt = 1  # passes over the prompt data
    max_epochs: PositiveInt = 1  # passes over the replay buffer for each rollout
    max_steps: Annotated[int, positive_or(-1, "no limit")] = -1  # rollout steps; -1: as many as num_episodes gives
    actor_learning_rate: NonNegativeFloat = 1e-6  # of the policy
    vision_learning_rate: NonNegativeFloat | None = None  # of the vision tower; default: actor_learning_rate
    projector_learning_rate: NonNegativeFloat | None = None  # of what joins tower and language model; default as above
    critic_learning_rate: NonNegativeFloat = 9e-6  # of the critic (PPO)
    lr_warmup_ratio: Annotated[float, within("[0, 1]")] = 0.03  # share of the steps in which the learning rate rises
    lr_scheduler: Annotated[str, one_of("cosine_with_min_lr", "constant_with_warmup", "linear")] = "cosine_with_min_lr"
    adam_betas: AdamBetas = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    l2: WeightDecay = 0.0  # weight decay
    max_norm: MaxNorm = 1.0  # gradients are clipped to this norm
    freezing_actor_steps: int = -1  # PPO: train the critic alone for this many steps first
    enable_ema: bool = False  # an average of the weights is kept, evaluated and saved
    ema_beta: Annotated[float, within("[0, 1)")] = 0.992  # share of the average that each step keeps
    ema_interval: ClassVar[int] = 1
    separate_old_log_probs: bool = False  # of a forward pass of their own even in a rollout's first update
    seed: Annotated[int, within("[0, 9223372036854775807]")] = 42  # of data, sampling and new weights

    def schedule(self, updates: int) -> tuple[str, int]:
        """(scheduler, optimizer steps of warm-up) of a run of `updates` steps. The rate of the first is 0."""
        return self.lr_scheduler, min(math.ceil(updates * self.lr_warmup_ratio), max(updates - 1, 0))

    def check(self) -> None:
        """The size of an update, and the budget of packed batches."""
        if self.gradient_accumulation_steps is not None:
            self.train_batch_size = accumulated(self.gradient_accumulation_steps, self.micro_train_batch_size)
        require(
            self.max_tokens_per_batch == 0 or (self.max_tokens_per_batch > 0 and self.packing_samples),
            "max_tokens_per_batch is a positive budget of packed batches: add --packing_samples (0 turns it off)",
        )

    def check_budget(self, longest: int, told: str) -> None:
        """Raise ConfigError where a packed batch has no room for a sample of so many tokens; told: those, in words."""
        budget = self.max_tokens_per_batch
        told = f"max_tokens_per_batch {budget} is less than one sample may have: {told}; set it to {longest} or more"
        require(budget == 0 or budget >= longest, told)


@dataclass
class RunConfig(Section):
    """The whole configuration of a vision-language run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    plugins: str | None = None  # files or modules that add choices of your own, imported first; comma-separated
    kind_of_run: ClassVar[str] = "vision-language"

    def updates(self, total_steps: int) -> int:
        """Optimizer steps of a run of `total_steps` rollout steps."""
        samples = self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        return total_steps * self.train.max_epochs * max(1, samples // (self.train.train_batch_size or samples))

    @property
    def response_max_len(self) -> int:
        """Most tokens behind a prompt: of a response, or of an episode."""
        return self.episodes.most_tokens(self.rollout.generate_max_len)

    def check(self) -> None:
        """What several sections must agree on."""
        settle_update(self.train, self.rollout)
        idle.check_run(self.algorithm, self.rollout)
        self._check_algorithm()
        self._check_lengths()
        self._check_offload()
        self.distributed.check_run(self.model, self.train)
        self.guard.check_run(self.gold is not None, self.data.evaluated)
        self.output.check_run(self.data, self.train)
        self._check_async()
        self.episodes.check_run(self)
        idle.check_any(self)

    def _check_async(self) -> None:
        rollout, ahead = self.rollout, self.asynchronous
        self.distributed.settle()
        corrected = self.algorithm.corrects_rollouts
        ahead.check_run(self.distributed.split, corrected)
        if not ahead.max_staleness:
            return
        for name, used in (
            ("dynamic_sampling", rollout.dynamic_sampling),
            ("noisy_rollout_share", rollout.noisy_rollout_share),
            ("balance_rollouts", rollout.balance_rollouts),
        ):
            require(not used, f"max_staleness above 0 generates ahead, and {name} cannot be part of that; leave it out")
        require(
            not self.output.eval_ema,
            "max_staleness above 0 generates ahead with the trained weights, and an evaluation of the averaged ones "
            "(eval_ema, the default with enable_ema) cannot be part of that: add --eval_ema false",
        )
        require(
            not ahead.partial_rollouts or (rollout.min_new_tokens <= 1 and not rollout.use_fire),
            "partial_rollouts make responses in segments, and min_new_tokens and use_fire count from a response's "
            "first token: leave them out",
        )
        require(
            not ahead.partial_rollouts or registry.engines[rollout.engine_type].continues,
            f"engine {rollout.engine_type} cannot go on with a response, as partial_rollouts need",
        )
        require(
            not ahead.behaviour(corrected) or (rollout.top_p == 1 and rollout.top_k == -1),
            "stale_correction behaviour reads sampled log-probs, which top_p < 1 or top_k leave undefined: "
            "use top_p 1, top_k -1, or async.stale_correction none",
        )

    @property
    def gold(self) -> RewardConfig | None:
        """What `guard.gold_*` names. The embedded questions have exact answers, which are gold where another reward is
        trained on: a reward that the run names, or the reasoning task's own."""
        name = self.data.prompt_data
        task = registry.tasks[name] if name in registry.tasks else None
        other = task is not None and (self.reward.given or task.reward is not None)
        own = RewardConfig(components=dict(task.gold)) if other and task.gold else None
        return self.guard.gold(self.reward) or own

    def _check_offload(self) -> None:
        zero, rollout = self.distributed, self.rollout
        require(
            not rollout.offload_trainer or (zero.zero_stage > 0 and not zero.adam_offload),
            "offload_trainer moves the states of ZeRO 1 to 3: it needs a zero_stage of 1 to 3, and no adam_offload, "
            "which keeps them on the host anyway",
        )
        require(
            not rollout.offload_reference
            or (self.algorithm.init_kl_coef > 0 and self.model.lora_rank == 0 and zero.zero_stage < 3),
            "offload_reference moves a whole reference model: it needs init_kl_coef > 0, lora_rank 0 (the reference of "
            "LoRA is the actor without its adapters) and zero_stage 0 to 2 (stage 3 divides it over the ranks)",
        )

    def _check_algorithm(self) -> None:
        algorithm, rollout, train = self.algorithm, self.rollout, self.train
        estimator, samples = algorithm.estimator, rollout.n_samples_per_prompt
        require(
            algorithm.ref_update_steps == 0 or self.model.lora_rank == 0,
            "ref_update_steps moves a copy of the model: with LoRA the reference is the model without its adapters",
        )
        require(
            algorithm.use_kl_loss is False or algorithm.init_kl_coef > 0, "use_kl_loss needs a positive init_kl_coef"
        )
        require(
            samples > 1 or not estimator.grouped,
            f"advantage_estimator {algorithm.advantage_estimator} compares samples of one prompt: "
            f"n_samples_per_prompt is {samples}, it must be at least 2",
        )
        require(
            not (estimator.components and (algorithm.reward_running_norm or algorithm.reward_clip)),
            f"advantage_estimator {algorithm.advantage_estimator} normalises each reward by itself: "
            "reward_running_norm and reward_clip, which act on their sum, do nothing there",
        )
        require(
            samples > 1 or not (rollout.dynamic_sampling or train.share_prefix),
            "dynamic_sampling and share_prefix need n_samples_per_prompt of at least 2",
        )
        require(
            not (rollout.dynamic_sampling and algorithm.advantage_estimator == "distillation"),
            "dynamic_sampling leaves out groups of equal rewards, which a teacher teaches as well: it does not fit "
            "advantage_estimator distillation",
        )
        require(
            estimator.critic or (train.freezing_actor_steps <= 0 and self.model.critic_pretrain is None),
            "freezing_actor_steps and critic_pretrain belong to a critic: they need advantage_estimator gae",
        )
        require(
            (self.model.teacher_pretrain is None) == (algorithm.teacher_coef == 0),
            "teacher_pretrain names the model of on-policy distillation, teacher_coef its weight: give both, or none",
        )
        loss = registry.policy_losses[algorithm.policy_loss]
        require(
            loss.aggregation in (None, algorithm.loss_agg_mode),
            f"policy_loss {loss.name} is made by --loss_agg_mode {loss.aggregation}: add it",
        )
        require(
            not (loss.weighs_rollouts and algorithm.corrects_rollouts),
            f"policy_loss {loss.name} compares with the engine's log-probs itself: leave tis_mode off",
        )
        weighs = loss.weighs_rollouts or algorithm.corrects_rollouts
        require(
            not (weighs or algorithm.off_policy_delta is not None) or (rollout.top_p == 1 and rollout.top_k == -1),
            f"policy_loss {loss.name}, tis_mode {algorithm.tis_mode} or off_policy_delta compares sampled log-probs, "
            "which top_p < 1 or top_k leave undefined: use top_p 1, top_k -1",
        )
        require(
            weighs or not rollout.coarse,
            "engine_quantization and an fp8 cache sample from another policy than is trained: add --tis_mode token, "
            "which weighs tokens up to tis_cap (2)",
        )

    def _check_lengths(self) -> None:
        algorithm, rollout, most = self.algorithm, self.rollout, self.response_max_len
        named = f"{most} of an episode" if self.episodes.used else said(rollout, "generate_max_len")
        self.train.check_budget(rollout.prompt_max_len + most, f"{said(rollout, 'prompt_max_len')} + {named}")
        require(
            not algorithm.overlong_buffer or algorithm.overlong_buffer_len < most,
            f"overlong_buffer_len {algorithm.overlong_buffer_len} must be less than {named}: every response would be "
            "penalised from its first token on",
        )
