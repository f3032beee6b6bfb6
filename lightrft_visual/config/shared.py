"""What the configurations of both kinds of run share: rewards, processes, outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from ..errors import ConfigError, did_you_mean
from ..runtime.presence import ranks_started
from .constraints import (
    Constraint,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Registry,
    Section,
    Share,
    not_usual,
    one_of,
    require,
    within,
)
from .placement import NAMES, OF_WORKERS, ResourcesConfig

EMBEDDED = "embedded"  # the built-in models, and the task that belongs to each
RUN_PARTS, LONGEST_INTERVAL = 10, 50  # checkpoints and evaluations where nothing is said: so many, so far apart
EMBEDDED_REASONING = "embedded_reasoning"  # prompt_data: the built-in task of longer responses


def _two_betas(betas: Sequence[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


AdamBetas = Annotated[list[float], Constraint(_two_betas, "it takes two numbers in [0, 1)")]
WeightDecay = Annotated[float, Constraint(lambda value: value >= 0, "weight decay must not be negative")]
MaxNorm = Annotated[float, Constraint(lambda value: value >= 0, "it must be positive, or 0 for no clipping")]
BadRows = Annotated[str, one_of("error", "skip")]

NONE, ATTENTION, FULL, AUTO = "none", "attention", "full", "auto"  # gradient_checkpointing; docs/gpu.md
RECOMPUTES = (ATTENTION, FULL)
BOOLS = {"true": FULL, "yes": FULL, "on": FULL, "1": FULL, "false": NONE, "no": NONE, "off": NONE, "0": NONE}
_words = one_of(NONE, ATTENTION, FULL, AUTO, meaning=lambda value: BOOLS.get(str(value).lower(), value))
Checkpointing = Annotated[bool | str, _words]


def accumulated(steps: int, micro_batch_size: int) -> int:
    """Samples of an update that is `steps` micro-batches on each rank, as many as the launcher started."""
    return steps * micro_batch_size * ranks_started()


def _meeting(given: int, usual: int) -> int:
    """About `usual` steps: a multiple of those that are given, or the largest part of them that is no less than half of
    the usual ones, else these. given: 0 or less where none are."""
    if 0 < given <= usual:
        return given * (usual // given)
    return next((each for each in range(usual, (usual - 1) // 2, -1) if given > 0 and given % each == 0), usual)


@dataclass
class PromptsConfig(Section):
    """Where prompts of any kind of run come from. tasks: the built-in ones."""

    prompt_data: str = EMBEDDED  # embedded, a file, a folder or a hub name; several by commas
    prompt_split: str = "train"  # split of a data set of the hub, or file of a folder
    eval_data: str | None = None  # default: the embedded held-out prompts when prompt_data is embedded
    eval_split: str = "test"  # the same for evaluation
    max_samples: PositiveInt = 100_000_000  # at most so many prompts of each data set are read
    max_eval_samples: NonNegativeInt = 500  # at most so many of each data set are evaluated
    input_key: str = "prompt"  # column of the prompt
    reference_key: str = "reference"  # column of the right answer, for rewards
    label_key: str = "label"  # column that names the recipe of a sample's rewards
    image_root: str | None = None  # folder that relative image paths start from; default: the data file's folder
    on_bad_row: BadRows = "error"  # skipped rows are counted by cause and listed in bad_rows.jsonl
    max_bad_share: Annotated[float, Share] = 0.05  # a larger share of skipped rows ends the run
    tasks: ClassVar[Registry[Any]]

    @property
    def evaluated(self) -> bool:
        """Whether there are held-out prompts."""
        return (self.eval_data is not None or self.prompt_data in self.tasks) and self.max_eval_samples > 0

    def check(self) -> None:
        """`eval_data` that names the built-in task of `prompt_data` is its held-out prompts: the default. ConfigError
        for another task's, and for a task beside data sets."""
        for name in ("prompt_data", "eval_data"):
            parts = [part.strip() for part in (getattr(self, name) or "").split(",")]
            alone = next((part for part in parts if part in self.tasks and len(parts) > 1), None)
            told = f"{name}: the built-in task {alone} stands alone: leave it out, or what is beside it"
            require(alone is None, told)
        if self.eval_data is not None and self.eval_data in self.tasks:
            told = f"eval_data {self.eval_data} is a built-in task, whose held-out prompts go with prompt_data of that"
            require(self.eval_data == self.prompt_data, f"{told} name: name a file of prompts")
            self.eval_data = None


# Settings of RewardConfig that are of calls, whichever reward is called.
OF_CALLS = (
    "reward_probe", "reward_timeout", "reward_retries", "reward_concurrency", "reward_token_env", "reward_image_format",
    "reward_fn_timeout", "on_reward_error", "reward_max_invalid",
)  # fmt: skip
REWARDS = ("reward_fn", "reward_pretrain", "remote_rm_url", "components", "reward_recipe")  # settings that name one


@dataclass
class RewardConfig(Section):
    """How rollouts are scored; see docs/rewards.md."""

    reward_fn: str | None = None  # path.py:function, or several, comma-separated
    reward_form: str = "auto"  # auto | native | a system of docs/coming_from.md: how functions by path are called
    reward_pretrain: str | None = None  # local reward model folders, comma-separated, each optionally name=folder
    remote_rm_url: str | None = None  # URLs, comma-separated, or path.py with reward_func
    components: dict[str, float] = field(default_factory=dict)  # {name: weight}, laid over reward_recipe
    kwargs: dict[str, Any] = field(default_factory=dict)  # {component: {setting: value}}
    reward_recipe: str | None = None  # YAML or JSON file, or inline YAML: {label: [[type, key, weight], ...]}
    # JSON form of remote_rm_url: auto | lightrft | openrlhf for all, a list in the order of the URLs, or url=wire,...
    reward_wire: str = "auto"
    reward_probe: bool = True  # ask every function and URL once, with a sample of the data, before any model loads
    reward_timeout: PositiveFloat = 60.0  # deadline of one remote call, seconds, retries included
    reward_retries: NonNegativeInt = 3  # on connection errors, 429 and 5xx only
    reward_concurrency: PositiveInt = 32  # remote requests in flight at once
    on_reward_error: BadRows = "error"  # skip: samples that a function raises on, or scores badly, become invalid
    reward_max_invalid: Annotated[float, Share] = 0.5  # share of invalid scores in one step above which the run stops
    reward_token_env: str | None = None  # environment variable that holds the bearer token of remote rewards
    reward_image_format: Annotated[str, one_of("png", "jpeg")] = "png"  # png is lossless
    reward_fn_timeout: PositiveFloat | None = None  # run user callables in a subprocess with this limit, seconds
    reward_transport: Annotated[str, one_of("inprocess", "ray")] = "inprocess"  # where local scorers run
    reward_cpu_offload: bool = True  # keep local reward models off the accelerator between uses
    every_label: ClassVar[bool] = True  # whether some row must have each label of the recipe, as the data are its own

    @property
    def given(self) -> bool:
        """Whether any reward is named."""
        return any(getattr(self, name) for name in REWARDS)

    def check(self) -> None:
        """kwargs without anything that they are settings of."""
        require(
            not self.kwargs or bool(self.components) or self.reward_recipe is not None,
            "reward.kwargs are settings of reward.components or of the reward_recipe; name one",
        )


@dataclass
class DistributedConfig(Section):
    """DeepSpeed ZeRO and process groups."""

    zero_stage: Annotated[int, one_of(0, 1, 2, 3)] = 2
    adam_offload: bool = False  # optimizer states lie on the host
    zpg: PositiveInt = 1  # ZeRO++ hierarchical partition size
    overlap_comm: bool = False  # ZeRO reduces gradients while backward goes on
    # of the sum over micro-batches; default: fp32 with ZeRO 2 and 3, else as the weights
    grad_accum_dtype: Annotated[str | None, one_of("fp32", "bf16")] = None
    sp_size: PositiveInt = 1  # ranks that train on a micro-batch together, each on a slice of its tokens (Ulysses)
    deterministic: bool = False  # operations that give the same bits each time, where there are such; slower
    local_rank: int = -1  # set by the launcher
    collective_timeout: PositiveFloat = 600.0  # seconds after which a dead or stalled rank ends all ranks
    # colocated: every rank generates and trains in turn; split: rollouts are made by workers on Ray, which is the
    # default where resources names devices of the rollouts
    placement: Annotated[str | None, one_of("colocated", "split")] = None
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def check(self) -> None:
        """What belongs to one ZeRO stage."""
        require(self.zpg == 1 or self.zero_stage == 3, "zpg belongs to ZeRO stage 3: add --zero_stage 3")
        require(
            not self.adam_offload or self.zero_stage > 0,
            "adam_offload is ZeRO's: stage 0 keeps gradients on the device, where the host's Adam cannot read them; "
            "use zero_stage 1 to 3",
        )

    def check_run(self, model: Any, train: Any) -> None:
        """Raise ConfigError where ZeRO or sp_size does not go with compile, the gradients' type or accumulation."""
        require(
            self.zero_stage > 0 or self.grad_accum_dtype in (None, "bf16" if model.bf16 else "fp32"),
            "grad_accum_dtype: ZeRO stage 0 adds gradients up in the type of the weights; use zero_stage 1 to 3",
        )
        require(
            not model.compile or self.zero_stage < 3,
            "compile needs whole weights on every rank, and ZeRO stage 3 divides them: set zero_stage 0 to 2",
        )
        require(not model.compile or self.sp_size == 1, "sp_size shares forwards without compile: leave one out")
        require(
            train.gradient_accumulation_steps is None or self.sp_size == 1,
            "gradient_accumulation_steps counts micro-batches of single ranks, and with sp_size several train on one: "
            "set train_batch_size",
        )

    def accumulated_in(self, bf16: bool) -> str | None:
        """`grad_accum_dtype` of a run whose weights are bf16 or not; None is the type of the weights."""
        return "fp32" if self.grad_accum_dtype is None and bf16 and self.zero_stage > 1 else self.grad_accum_dtype

    def settle(self) -> None:
        """The placement where none was named. For a whole configuration: a section's defaults are checked by itself,
        before other layers name devices. Raises ConfigError."""
        divided = self.resources.rollout_devices is not None
        if self.placement is None:
            self.placement = "split" if divided else "colocated"
        require(self.split or not divided, "rollout_devices belongs to --placement split")
        named = not_usual(self.resources, OF_WORKERS)
        require(self.split or not named, f"{', '.join(named)}: of rollout workers, add --placement split")

    @property
    def split(self) -> bool:
        """Whether rollouts are made by workers of their own."""
        return self.placement == "split"


@dataclass
class PlanConfig(Section):
    """What a run will hold, worked out before anything loads; see docs/gpu.md. A recipe names its hardware here."""

    plan_device: str | None = None  # what --dry_run plans for, such as h100-80gb; default: the device of this machine
    plan_world_size: PositiveInt | None = None  # ranks of that plan; default: the trainer's, else a host of the device
    # A run that does not fit by its plan: warn, and refuse it where weights, gradients and states alone do not fit;
    # refuse it; or force its start.
    plan: Annotated[str, one_of("warn", "refuse", "force")] = "warn"
    # Micro-batches as large as the plan has room for; what is given is the least. Default: on an accelerator.
    auto_micro_batches: bool | None = None

    def sizes_micro_batches(self, on_cpu: bool) -> bool:
        """Whether the plan chooses sizes for a device of this kind."""
        return not on_cpu if self.auto_micro_batches is None else self.auto_micro_batches

    def check(self) -> None:
        """A device that is known."""
        name = self.plan_device
        if name is not None and name not in NAMES:
            longer = [each for each in NAMES if each.startswith(name.lower())]
            hint = f"; did you mean {longer[0]!r}?" if longer else did_you_mean(name, NAMES)
            raise ConfigError(f"plan_device is {name!r}{hint}")


@dataclass
class GuardConfig(Section):
    """What is watched beside the reward; see docs/guard.md."""

    watch: bool = True  # look at every step's and evaluation's metrics, and warn
    policy: Annotated[str, one_of("warn", "stop", "rollback")] = "warn"  # what an alarm does beside warning
    gold_recipe: str | None = None  # a reward recipe that training never sees; default: of the embedded tasks their own
    gold_fn: str | None = None  # or path.py:function
    gold_every: NonNegativeInt = 1  # score the rollouts of every so many steps by gold too; 0: evaluations only
    patience: PositiveInt = 2  # steps in a row outside before an alarm
    keep_best: bool | None = None  # keep a checkpoint of the best gold; default: with policy rollback

    @property
    def keeps_best(self) -> bool:
        """Whether each new best gold of an evaluation is saved as checkpoint-best."""
        return self.policy == "rollback" if self.keep_best is None else self.keep_best

    @property
    def judges_rollouts(self) -> bool:
        """Whether gold scores what training draws, and not evaluations alone."""
        return self.watch and self.gold_every > 0

    def check(self) -> None:
        """What rolling back goes back to; one gold."""
        require(self.watch or self.policy == "warn", f"policy {self.policy} acts on alarms: it needs guard.watch")
        require(
            self.policy != "rollback" or self.keeps_best, "policy rollback goes back to the best checkpoint: keep_best"
        )
        require(self.gold_recipe is None or self.gold_fn is None, "give gold_recipe or gold_fn, not both")

    def check_run(self, gold: bool, evaluated: bool, drawn: bool = True) -> None:
        """Raise ConfigError where gold that is named has nothing to score, or checkpoint-best (of eval_gold) no gold.

        Args:
            gold: whether the run has gold, be it a built-in task's.
            evaluated: whether there are held-out prompts.
            drawn: whether there are rollouts.
        """
        need = "guard.keep_best (and policy rollback) keeps the checkpoint of the best eval_gold: "
        require(not self.keeps_best or gold, need + "name a judge by --gold_recipe or --gold_fn")
        require(not self.keeps_best or evaluated, need + "name held-out prompts by --eval_data")
        named = self.gold_recipe is not None or self.gold_fn is not None
        none = "gold_every 0, or watch false" if drawn else "pairs of a file"
        told = f"gold has nothing to score: no rollouts ({none}), and no held-out prompts (eval_data, max_eval_samples)"
        require(not named or evaluated or (drawn and self.judges_rollouts), told)

    def gold(self, reward: RewardConfig) -> RewardConfig | None:
        """How gold is scored; None where nothing is named. reward: of the run, for limits and token of calls."""
        if self.gold_recipe is None and self.gold_fn is None:
            return None
        calls = {name: getattr(reward, name) for name in OF_CALLS}
        return type(reward)(reward_recipe=self.gold_recipe, reward_fn=self.gold_fn, **calls)


@dataclass
class OutputConfig(Section):
    """What a run writes, how often, and where it resumes from. Steps are rollout steps."""

    output_dir: str = "outputs/run"  # holds all that a run writes
    save_path: str | None = None  # the final model; default: <output_dir>/checkpoint-final
    ckpt_path: str | None = None  # default: <output_dir>
    save_steps: int | None = None  # -1: none; default: ten times a run, and every 50 steps at least
    eval_steps: int | None = None  # as save_steps; evaluation always runs before the first step and at the end
    logging_steps: PositiveInt = 1  # a line on the screen every so many steps; metrics.csv has all
    max_ckpt_num: PositiveInt = 3  # checkpoints that are kept
    async_save: bool = False  # write checkpoints while the run goes on, from a copy in host memory
    load_checkpoint: bool = False  # same as resume_from=auto
    resume_from: str | None = None  # a checkpoint folder, or auto
    resume_other_model: bool = False  # resume although the checkpoint was trained from another model
    sigterm_exit_code: Annotated[int, within("[0, 255]")] = 143  # of a run that SIGTERM ended after a checkpoint
    best_metric: str | None = None  # column of eval_metrics.csv by which the best checkpoint is kept
    eval_samples_per_prompt: PositiveInt = 4  # samples of each evaluated prompt
    eval_seed: int | None = None  # of what the evaluation draws; default: seed
    eval_ema: bool | None = None  # evaluate and export the EMA weights; default: with enable_ema
    use_wandb: bool = False  # metrics go to Weights & Biases too
    use_tensorboard: bool = False  # metrics go to TensorBoard too
    save_trajectories: bool = True  # rollouts are written to rollouts/
    num_trajectories_to_save: NonNegativeInt = 8  # rollouts of a step that are written
    report: bool = True  # report.html at the end
    run_name: str | None = None  # in logs and the report; default: the folder's

    @property
    def records_kept(self) -> int:
        """Rollouts of a step, and of an evaluation, that are written."""
        return self.num_trajectories_to_save if self.save_trajectories else 0

    @property
    def resumes_from(self) -> str | None:
        """What a run goes on from: a checkpoint, a run's folder or auto; None for a fresh start."""
        return "auto" if self.resume_from is None and self.load_checkpoint else self.resume_from

    @property
    def best(self) -> tuple[str, str] | None:
        """(metric, "max" | "min") of `best_metric`: "eval_reward", "max:eval_reward" or "min:eval_length"."""
        if self.best_metric is None:
            return None
        mode, separator, name = self.best_metric.rpartition(":")
        told = f"best_metric is {self.best_metric!r}; write it as NAME, max:NAME or min:NAME"
        require(mode in (("max", "min") if separator else ("",)) and bool(name), told)
        return name, mode or "max"

    def check(self) -> None:
        """A best checkpoint has an evaluation of its own."""
        save, evaluate = self.intervals(1)
        require(
            self.best is None or (save > 0 and evaluate > 0 and save % evaluate == 0),
            f"best_metric compares checkpoints by their own evaluation: save_steps ({save}) must be a multiple of "
            f"eval_steps ({evaluate}), both positive",
        )

    def intervals(self, total_steps: int) -> tuple[int, int]:
        """(steps between checkpoints, steps between evaluations) of a run; 0 or less: none.

        Where one is given, the other one meets it if a part or a multiple is near: checkpoints are then judged by
        evaluations of their own weights.
        """
        usual = min(LONGEST_INTERVAL, -(-total_steps // RUN_PARTS))
        save, evaluate = self.save_steps, self.eval_steps
        if evaluate is None:
            evaluate = save if self.best is not None and save is not None else _meeting(save or 0, usual)
        if save is None:
            save = evaluate if self.best is not None and evaluate > usual else _meeting(evaluate, usual)
        return save, evaluate

    def check_run(self, data: Any, train: Any) -> None:
        """Raise ConfigError where there are no held-out prompts for `best_metric`, or no average for `eval_ema`, which
        follows `enable_ema` where it was not set."""
        told = "best_metric compares evaluations, and there are no held-out prompts (eval_data, max_eval_samples)"
        require(self.best is None or data.evaluated, told)
        if self.eval_ema is None:
            self.eval_ema = train.enable_ema
        require(train.enable_ema or not self.eval_ema, "eval_ema evaluates the EMA weights: add --enable_ema")
