"""Training, evaluation and sampling from Python; docs/python.md is the guide.

    from lightrft_visual import GRPOTrainer

    trainer = GRPOTrainer(model="Qwen/Qwen2.5-VL-3B-Instruct", reward_funcs=[my_reward], train_dataset=rows)
    result = trainer.fit()

Settings are checked when a trainer is made; torch is loaded by `fit`.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .arguments import (
    SAVING_LIMIT,
    Said,
    by_path,
    check_kinds,
    data_of,
    data_settings,
    emptied,
    episode_settings,
    name_of,
    noted,
    plain_settings,
    refuse_both,
    reward_settings,
    saved,
    split_of,
)  # fmt: skip
from .config.constraints import together
from .config.given_files import missing_files
from .config.leaves import names_of
from .config.load import parse_run
from .config.spellings import ALGORITHMS, Root
from .errors import CheckpointError, ConfigError, LightRFTVisualError
from .given import forget, give, given, is_given, names_given, source_of
from .runtime.presence import ranks_on_host

if TYPE_CHECKING:
    from typing import Self, Unpack

    from .settings import Code, DiffusionSettings, SFTSettings, StrPath, VLSettings


@dataclass(frozen=True)
class Result:
    """What a run came to.

    metrics: of the last step and of the last evaluation. history: metrics of each step, with `step`; evaluations: the
    same of each evaluation; of a resumed run also those of before. checkpoint: the trained model for other programs, or
    where the run was stopped its newest checkpoint. report: the page with curves and samples. stopped: whether a signal
    ended the run early.
    """

    metrics: dict[str, float]
    history: list[dict[str, float]] = field(repr=False)  # long
    evaluations: list[dict[str, float]] = field(repr=False)
    output_dir: Path
    checkpoint: Path | None
    report: Path | None
    stopped: bool = False


@dataclass
class _History:
    """A hook that keeps what the run says of its steps and evaluations; the same on every rank."""

    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)

    def setup(self, context: Any) -> None:
        self._context = context

    def on_metrics(self, metrics: Mapping[str, float]) -> None:
        self.steps.append({"step": self._context.step(), **metrics})

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.evaluations.append({"step": self._context.step(), **metrics})


class _Trainer:
    """Checks what it is given and runs it; also a context manager, which closes it.

    Args:
        model: a hub name, a folder, 'embedded' (the built-in tiny model), or a loaded model or pipeline. A loaded one
            stays as it is: the trained weights are in `Result.checkpoint`.
        reward_funcs: one reward or several, which are summed: functions, modules, `path.py:name`, URLs, names of
            scorers, folders of reward models, `{scorer: weight}`, or a recipe (a mapping of labels, or a YAML file).
        train_dataset: a `datasets.Dataset`, a list of mappings, a file, a folder, or a hub name.
        eval_dataset: the same for held-out prompts.
        processing_class: processor (or tokenizer) of a loaded model; `model=(model, processor)` says the same.
        reward_weights: of several `reward_funcs`, in their order; default: 1 each.
        callbacks: `StepHook`s.
        environment: what answers the model over several turns (of models that answer): `path.py:Class`, a class, or a
            function that makes one.
        tools: functions that the model may call (of models that answer), also as `path.py:name`.
        config: recipes by name or path, below the settings.
        **settings: every setting of the run by its name.

    Raises:
        ConfigError: for a setting that does not exist, with the nearest name, and for whatever cannot work.
    """

    root: ClassVar[Root]
    defaults: ClassVar[dict[str, Any]]  # settings of the algorithm, below recipes

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] = (),
        environment: Any = None,
        tools: Any = None,
        *,
        reward_weights: Sequence[float] | None = None,
        config: StrPath | Sequence[StrPath] = (),
        **settings: Any,
    ) -> None:
        if isinstance(model, tuple) and len(model) == 2:
            model, processing_class = model
        check_kinds(model, callbacks, config, processing_class)
        self.callbacks = list(callbacks)
        self._result: Result | None = None
        self._measured: list[dict[str, float]] = []  # evaluations of what `fit` trained, in this process
        self._closed = False
        self._loaded = (model, processing_class) if hasattr(model, "save_pretrained") else None
        talks = names_of(self.root.schema).knows("environment")
        episodes = {"environment": environment, "tools": tools}
        settings |= {name: each for name, each in episodes.items() if each is not None and (talks or each)}
        wrong: list[LightRFTVisualError] = []
        with names_given() as self._given:
            said = by_path(settings, self.root.schema)
            own = self._settings_of(model, reward_funcs, train_dataset, eval_dataset, reward_weights, said, wrong)
            settings |= episode_settings(settings, wrong)
            settings |= data_settings(settings, said, wrong)
            plain = plain_settings(settings, self.root.schema, wrong)
            recipes = [config] if isinstance(config, str | os.PathLike) else config
            argv = [word for recipe in recipes for word in ("--config", str(recipe))]
            files = partial(missing_files, names=own | settings)  # what recipes name is looked for by a run
            self.config = parse_run(
                self.root.schema, argv, defaults=self.defaults,
                settings=own | plain, files=None if wrong else files, wrong=wrong,
            ).config  # fmt: skip
            if missing := files(self.config):
                raise together([ConfigError(line) for line in missing])

    def _settings_of(
        self, model: Any, reward_funcs: Any, train_dataset: Any, eval_dataset: Any, reward_weights: Any, said: Said,
        wrong: list[LightRFTVisualError],
    ) -> dict[str, Any]:  # fmt: skip
        """What the arguments say, as settings; objects by their names."""
        given: dict[str, Any] = {}
        if model is not None:
            given["pretrain"] = give("model", model) if self._loaded else str(model)
        with noted(wrong):
            if reward_funcs is not None or reward_weights is not None:
                given |= self._rewards(reward_funcs, reward_weights)
        with noted(wrong):
            if train_dataset is not None:
                given |= self._training_data(train_dataset, said)
        with noted(wrong):
            if eval_dataset is not None:
                given["eval_data"] = data_of(eval_dataset, "eval_dataset", split_of(said, "eval_split"))
        with noted(wrong):
            refuse_both(by_path(given, self.root.schema), said)
        return emptied(given) | given

    def fit(self) -> Result:
        """Train to the last step. Raises what went wrong, as the errors of `lightrft_visual.errors`; what was written
        until then stays."""
        from .launch import run

        history = _History()
        with self.model_on_disk():
            trainer = run(self.config, [*self.callbacks, history])
        self._result, self._measured = _result(trainer, history), history.evaluations
        del trainer
        gc.collect()  # models and engine refer to each other, and would keep the device's memory
        from deepspeed.accelerator import get_accelerator  # loads torch, which `run` prepares

        get_accelerator().empty_cache()  # other programs of the device may need it
        return self._result

    def train(self, resume_from_checkpoint: Any = None) -> Result:
        """`fit`, as TRL calls it. Raises ConfigError for a checkpoint, which the trainer itself takes."""
        if resume_from_checkpoint:
            raise ConfigError("resume_from_checkpoint: give the trainer resume_from=FOLDER, or resume_from='auto'")
        return self.fit()

    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out prompts: of the model as it was given, after `fit` of what was trained.

        Raises ConfigError without held-out prompts; CheckpointError after a `fit` that neither evaluated nor left a
        checkpoint."""
        if not self.config.data.evaluated:
            raise ConfigError("there is nothing to evaluate on: give eval_dataset")
        result, measured = self._result, self._measured
        if result is not None and measured and measured[-1]["step"] == result.metrics["step"]:
            return {name: value for name, value in measured[-1].items() if name != "step"}
        from .launch import started

        with self.model_on_disk(), tempfile.TemporaryDirectory(prefix="lightrft_visual_") as scratch:
            config = copy.deepcopy(self.config)
            output = config.output
            folder = output.ckpt_path or output.output_dir
            output.resume_from, output.load_checkpoint = None if result is None else str(_newest(folder)), False
            output.output_dir, output.save_path, output.ckpt_path = os.path.join(scratch, "run"), None, None
            output.save_steps, output.report, output.use_wandb, output.use_tensorboard = -1, False, False, False
            with started(config) as trainer:
                return dict(trainer.evaluate())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copy `Result.checkpoint` to a folder, with its run's settings: what `fit` trained, for other programs; of a
        run that was stopped what it is resumed from. Returns it. Of several ranks the first copies, and others of its
        host that call it wait. Raises ConfigError before `fit`, and for a folder that is there already; CheckpointError
        where none came."""
        checkpoint, path, rank = self._result and self._result.checkpoint, Path(path), int(os.environ.get("RANK") or 0)
        if checkpoint is None:
            raise ConfigError("nothing is trained yet: call fit before save")
        if rank == 0:
            if path.exists():
                raise ConfigError(f"{path} is there already")
            staging = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                shutil.copytree(checkpoint, staging)
                with suppress(FileNotFoundError):
                    shutil.copy(self._result.output_dir / "config.resolved.yaml", staging)
                os.replace(staging, path)
            finally:
                shutil.rmtree(staging, ignore_errors=True)  # where the copy failed
        ends = time.monotonic() + SAVING_LIMIT
        while rank < ranks_on_host() and not path.is_dir() and time.monotonic() < ends:
            time.sleep(0.1)
        if rank < ranks_on_host() and not path.is_dir():
            raise CheckpointError(f"{path} is not there: the first rank has not saved it")
        return path

    def close(self) -> None:
        """Let go of the model, the functions and the data that it was given; it cannot train afterwards."""
        forget(self._given)
        self._given, self._loaded, self._closed = [], None, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rewards(self, rewards: Any, weights: Sequence[float] | None) -> dict[str, Any]:
        return reward_settings(rewards, weights)

    def _training_data(self, data: Any, said: Said) -> dict[str, Any]:
        return {"prompt_data": data_of(data, "train_dataset", split_of(said, "prompt_split"))}

    @contextmanager
    def model_on_disk(self) -> Iterator[None]:
        """Inside, a loaded model lies in a folder, from which every part of the run reads it. Raises ConfigError for a
        trainer that is closed."""
        if self._closed:
            raise ConfigError("this trainer is closed: make another")
        if self._loaded is None:
            yield
            return
        named = self.config.model.pretrain
        with saved(*self._loaded) as folder:
            self.config.model.pretrain = str(folder)
            try:
                yield
            finally:
                self.config.model.pretrain = named


class GRPOTrainer(_Trainer):
    """GRPO for vision-language models, and its relatives by `advantage_estimator` and `policy_loss`."""

    root, defaults = ALGORITHMS["grpo"]

    if TYPE_CHECKING:

        def __init__(
            self, model: Any = None, reward_funcs: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
            processing_class: Any = None, callbacks: Sequence[Any] = (), environment: Code | None = None,
            tools: Code | Sequence[Code] | None = None, *, config: StrPath | Sequence[StrPath] = (),
            reward_weights: Sequence[float] | None = None, **settings: Unpack[VLSettings],
        ) -> None: ...  # fmt: skip


class PPOTrainer(GRPOTrainer):
    """PPO for vision-language models: with a critic."""

    root, defaults = ALGORITHMS["ppo"]


class RLOOTrainer(GRPOTrainer):
    """RLOO for vision-language models: against the mean of the prompt's other samples."""

    root, defaults = ALGORITHMS["rloo"]


class SFTTrainer(_Trainer):
    """Supervised training on rows with a response: a start for a model that does not know a form yet. Its checkpoint is
    a `model` of the other trainers. `reward_funcs`, `environment` and `tools` are no arguments of it."""

    root, defaults = ALGORITHMS["sft"]

    def __init__(
        self, model: Any = None, train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None, *,
        callbacks: Sequence[Any] = (), config: StrPath | Sequence[StrPath] = (), **settings: Unpack[SFTSettings],
    ) -> None:  # fmt: skip
        for name in ("reward_funcs", "reward_weights"):
            if settings.pop(name, None) is not None:  # type: ignore[misc]
                raise ConfigError(f"{name} belongs to runs with rewards; supervised training has none: leave it out")
        super().__init__(
            model, None, train_dataset, eval_dataset, processing_class, callbacks=callbacks, config=config, **settings
        )


class UnifiedTrainer(GRPOTrainer):
    """GRPO for a model that answers and draws (Janus): both kinds of responses in one buffer."""

    root, defaults = ALGORITHMS["unified"]


class FlowGRPOTrainer(_Trainer):
    """Flow-GRPO for diffusion models, and its relatives by `diffusion_algorithm`."""

    root, defaults = ALGORITHMS["flow-grpo"]

    if TYPE_CHECKING:

        def __init__(
            self, model: Any = None, reward_funcs: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
            processing_class: Any = None, callbacks: Sequence[Any] = (), environment: None = None,
            tools: Sequence[Any] | None = None, *, config: StrPath | Sequence[StrPath] = (),
            reward_weights: Sequence[float] | None = None, **settings: Unpack[DiffusionSettings],
        ) -> None: ...  # fmt: skip


class DiffusionNFTTrainer(FlowGRPOTrainer):
    """DiffusionNFT: policy improvement on the forward process."""

    root, defaults = ALGORITHMS["nft"]


class DDPOTrainer(FlowGRPOTrainer):
    """DDPO, for models that predict noise."""

    root, defaults = ALGORITHMS["ddpo"]


class RewardFLTrainer(FlowGRPOTrainer):
    """Reward FL: the gradient of a differentiable reward, which `reward_funcs` names: a function of (media, prompts,
    metadata), or a name of the registry."""

    root, defaults = ALGORITHMS["reward-fl"]

    def _rewards(self, rewards: Any, weights: Sequence[float] | None) -> dict[str, Any]:
        (reward,) = rewards if isinstance(rewards, list | tuple) and len(rewards) == 1 else (rewards,)
        reward = os.fspath(reward) if isinstance(reward, os.PathLike) else reward
        if weights is not None or not (callable(reward) or isinstance(reward, str)):
            raise ConfigError("Reward FL trains on one differentiable reward: a function, path.py:name or a name")
        return {"differentiable_reward": give(name_of(reward), reward) if callable(reward) else reward}


class DiffusionDPOTrainer(FlowGRPOTrainer):
    """Diffusion-DPO: online, on ranked samples; or on pairs, where `train_dataset` holds rows with `chosen` and
    `rejected` images (a file of them is `pair_data`)."""

    root, defaults = ALGORITHMS["dpo"]

    def _training_data(self, data: Any, said: Said) -> dict[str, Any]:
        split = split_of(said, "prompt_split")
        named = data_of(data, "train_dataset", split)
        first = source_of(given(named), "train_dataset", split)[0] if is_given(named) else None
        pairs = isinstance(first, Mapping) and not first.keys().isdisjoint(("chosen", "jpg_0"))
        pairs = pairs or "data.chosen_key" in said or "data.rejected_key" in said
        return {"pair_data" if pairs else "prompt_data": named}


def _shown(kind: type[_Trainer]) -> None:
    """Give a trainer class the signature that editors and notebooks complete from: every setting by its name."""
    given = list(inspect.signature(kind.__init__).parameters.values())[1:-1]
    arguments = {each.name for each in given}
    names = {leaf.name: leaf for leaf in names_of(kind.root.schema).leaves.values() if leaf.name not in arguments}
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=leaf.default, annotation=leaf.type_name)
        for name, leaf in names.items()
    ]
    kind.__signature__ = inspect.Signature([*given, *own])  # type: ignore[attr-defined]
    told = "\n".join(f"    {name}: {leaf.help or leaf.section}" for name, leaf in names.items())
    kind.__doc__ = f"{kind.__doc__}\n\n{_Trainer.__doc__}\n\nSettings:\n{told}"


TRAINERS: tuple[type[_Trainer], ...] = (
    GRPOTrainer, PPOTrainer, RLOOTrainer, UnifiedTrainer, SFTTrainer, FlowGRPOTrainer, DiffusionNFTTrainer, DDPOTrainer,
    RewardFLTrainer, DiffusionDPOTrainer,
)  # fmt: skip
for _kind in TRAINERS:
    _shown(_kind)


# -- results, evaluation, samples ------------------------------------------------------------------------------------


def _newest(folder: str) -> Path:
    """The checkpoint in a folder from which a run would go on."""
    from .runtime.checkpoint.manager import resolve_resume

    return resolve_resume("auto", folder)


def _before(trainer: Any) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Metrics of steps and of evaluations that the folder of a resumed run has, on every rank."""
    from .runtime.collectives import broadcast_object, is_rank_0

    if trainer.state.resume_folder is None:
        return [], []
    folder = Path(trainer.settings.output.output_dir)
    files = "metrics.csv", "eval_metrics.csv"
    return broadcast_object(tuple(_by_step(folder / file) for file in files) if is_rank_0() else None)


def _by_step(file: Path) -> list[dict[str, float]]:
    from .observe.report.data import read_columns

    found: dict[int, dict[str, float]] = {}
    with suppress(OSError):  # it may be gone
        for name, points in read_columns(file).items():
            for step, value in points:
                found.setdefault(int(step), {"step": int(step)})[name] = value
    return [found[step] for step in sorted(found)]


def _result(trainer: Any, history: _History) -> Result:
    from .runtime.checkpoint.manager import on_rank_0

    folder, state = Path(trainer.settings.output.output_dir), trainer.state
    checkpoint = state.exported or on_rank_0(  # an earlier run's export may lie beside it
        "looking for the newest checkpoint", lambda: next(state.manager.candidates(), (None,))[0]
    )
    report = folder / "report.html"
    steps, evaluations = (
        [each for each in before if not own or each["step"] < own[0]["step"]] + own
        for before, own in zip(_before(trainer), (history.steps, history.evaluations))
    )
    last = [each[-1] for each in (steps, evaluations) if each]
    metrics = {name: value for each in last for name, value in each.items()}
    return Result(
        metrics | {"step": trainer.step}, steps, evaluations, folder, checkpoint,
        report if report.is_file() else None, state.stopped,
    )  # fmt: skip
