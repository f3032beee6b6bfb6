"""Training, evaluation and sampling from Python; docs/python.md is the guide.

    from lightrft_visual import GRPOTrainer

    trainer = GRPOTrainer(model="Qwen/Qwen2.5-VL-3B-Instruct", reward_funcs=[my_reward], train_dataset=rows)
    result = trainer.fit()

Settings are checked when a trainer is made; torch is loaded by `fit`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .config import registry
from .config.leaves import names_of
from .config.load import parse_run
from .config.recipes import SUFFIXES
from .config.spellings import ALGORITHMS, Root
from .errors import ConfigError, DataError
from .given import give

if TYPE_CHECKING:
    from typing import Unpack

    from .settings import DiffusionSettings, SFTSettings, VLSettings

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DATA_FILES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
SAVING_LIMIT = 3600.0  # seconds that the ranks of a host wait for the first one to save a loaded model


@dataclass(frozen=True)
class Result:
    """What a run came to.

    metrics: of the last step and of the last evaluation. history: metrics of each step, with `step`; evaluations: the
    same of each evaluation. checkpoint: the trained model for other programs, or where the run was stopped its newest
    checkpoint. report: the page with curves and samples. stopped: whether a signal ended the run early.
    """

    metrics: dict[str, float]
    history: list[dict[str, float]]
    evaluations: list[dict[str, float]]
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
    """Checks what it is given and runs it.

    Args:
        model: a hub name, a folder, 'embedded' (the built-in tiny model), or a loaded model or pipeline. A loaded one
            stays as it is: the trained weights are in `Result.checkpoint`.
        reward_funcs: one reward or several, which are summed: functions, modules, `path.py:name`, URLs, names of
            scorers, folders of reward models, `{scorer: weight}`, or a recipe (a mapping of labels, or a YAML file).
        train_dataset: a `datasets.Dataset`, a list of mappings, a file, a folder, or a hub name.
        eval_dataset: the same for held-out prompts.
        processor: of a loaded vision-language model; `model=(model, processor)` says the same.
        reward_weights: of several `reward_funcs`, in their order; default: 1 each.
        callbacks: `StepHook`s.
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
        *,
        processor: Any = None,
        reward_weights: Sequence[float] | None = None,
        callbacks: Sequence[Any] = (),
        config: str | Sequence[str] = (),
        **settings: Any,
    ) -> None:
        if isinstance(model, tuple):
            model, processor = model
        self.callbacks = list(callbacks)
        self._loaded = (model, processor) if hasattr(model, "save_pretrained") else None
        given: dict[str, Any] = {}
        if model is not None:
            given["pretrain"] = give("model", model) if self._loaded else str(model)
        if reward_funcs is not None:
            given |= self._rewards(reward_funcs, reward_weights)
        if train_dataset is not None:
            given |= self._training_data(train_dataset, settings.get("prompt_split", "train"))
        if eval_dataset is not None:
            given["eval_data"] = data_of(eval_dataset, "eval_dataset", settings.get("eval_split", "test"))
        _refuse_both(given, settings)
        recipes = [config] if isinstance(config, str) else config
        argv = [word for recipe in recipes for word in ("--config", str(recipe))]
        self.config = parse_run(
            self.root.schema, argv, preset=self.root.preset, defaults=self.defaults, settings=given | _plain(settings)
        ).config

    def fit(self) -> Result:
        """Train to the last step. Raises what went wrong, as the errors of `lightrft_visual.errors`; what was written
        until then stays."""
        from .launch import run

        history = _History()
        with self.model_on_disk():
            trainer = run(self.config, [*self.callbacks, history])
        return _result(trainer, history)

    def _rewards(self, rewards: Any, weights: Sequence[float] | None) -> dict[str, Any]:
        return reward_settings(rewards, weights)

    def _training_data(self, data: Any, split: str) -> dict[str, Any]:
        return {"prompt_data": data_of(data, "train_dataset", split)}

    @contextmanager
    def model_on_disk(self) -> Iterator[None]:
        """Inside, a loaded model lies in a folder, from which every part of the run reads it."""
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
            self, model: Any = None, reward_funcs: Any = None, train_dataset: Any = None, eval_dataset: Any = None, *,
            processor: Any = None, reward_weights: Sequence[float] | None = None, callbacks: Sequence[Any] = (),
            config: str | Sequence[str] = (), **settings: Unpack[VLSettings],
        ) -> None: ...  # fmt: skip


class PPOTrainer(GRPOTrainer):
    """PPO for vision-language models: with a critic."""

    root, defaults = ALGORITHMS["ppo"]


class RLOOTrainer(GRPOTrainer):
    """RLOO for vision-language models: against the mean of the prompt's other samples."""

    root, defaults = ALGORITHMS["rloo"]


class SFTTrainer(_Trainer):
    """Supervised training on rows with a response: a start for a model that does not know a form yet. Its checkpoint is
    a `model` of the other trainers. `reward_funcs` is no argument of it."""

    root, defaults = ALGORITHMS["sft"]

    def __init__(
        self, model: Any = None, train_dataset: Any = None, eval_dataset: Any = None, *, processor: Any = None,
        callbacks: Sequence[Any] = (), config: str | Sequence[str] = (), **settings: Unpack[SFTSettings],
    ) -> None:  # fmt: skip
        super().__init__(
            model, None, train_dataset, eval_dataset, processor=processor, callbacks=callbacks, config=config,
            **settings,
        )  # fmt: skip


class FlowGRPOTrainer(_Trainer):
    """Flow-GRPO for diffusion models, and its relatives by `diffusion_algorithm`."""

    root, defaults = ALGORITHMS["flow-grpo"]

    if TYPE_CHECKING:

        def __init__(
            self, model: Any = None, reward_funcs: Any = None, train_dataset: Any = None, eval_dataset: Any = None, *,
            processor: Any = None, reward_weights: Sequence[float] | None = None, callbacks: Sequence[Any] = (),
            config: str | Sequence[str] = (), **settings: Unpack[DiffusionSettings],
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
        if weights is not None or not (callable(reward) or isinstance(reward, str)):
            raise ConfigError("Reward FL trains on one differentiable reward: a function, path.py:name or a name")
        return {"differentiable_reward": give(name_of(reward), reward) if callable(reward) else reward}


class DiffusionDPOTrainer(FlowGRPOTrainer):
    """Diffusion-DPO: online, on ranked samples; or on pairs, where `train_dataset` holds rows with `chosen` and
    `rejected` images (a file of them is `pair_data`)."""

    root, defaults = ALGORITHMS["dpo"]

    def _training_data(self, data: Any, split: str) -> dict[str, Any]:
        named = data_of(data, "train_dataset", split)
        first = data[0] if isinstance(data, Sequence) and not isinstance(data, str) and data else {}
        columns = set(getattr(data, "column_names", None) or first)
        return {"pair_data" if columns & {"chosen", "jpg_0"} else "prompt_data": named}


def _shown(kind: type[_Trainer]) -> None:
    """Give a trainer class the signature that editors and notebooks complete from: every setting by its name."""
    given = list(inspect.signature(kind.__init__).parameters.values())[1:-1]
    names = {leaf.name: leaf for leaf in names_of(kind.root.schema).leaves.values()}
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=leaf.default, annotation=leaf.type_name)
        for name, leaf in names.items()
    ]
    kind.__signature__ = inspect.Signature([*given, *own])  # type: ignore[attr-defined]
    told = "\n".join(f"    {name}: {leaf.help or leaf.section}" for name, leaf in names.items())
    kind.__doc__ = f"{kind.__doc__}\n\n{_Trainer.__doc__}\n\nSettings:\n{told}"


TRAINERS: tuple[type[_Trainer], ...] = (
    GRPOTrainer, PPOTrainer, RLOOTrainer, SFTTrainer, FlowGRPOTrainer, DiffusionNFTTrainer, DDPOTrainer,
    RewardFLTrainer, DiffusionDPOTrainer,
)  # fmt: skip
for _kind in TRAINERS:
    _shown(_kind)


# -- what is given ---------------------------------------------------------------------------------------------------


def _refuse_both(given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """A model, data or a reward is given in one way."""
    arguments = {"pretrain": "model", "prompt_data": "train_dataset", "eval_data": "eval_dataset"}
    for name in given.keys() & settings.keys():
        raise ConfigError(f"{name} says the same as {arguments.get(name, 'reward_funcs')}: give one of them")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as YAML would hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in settings.items()}


def data_of(data: Any, name: str, split: str) -> str:
    """Data as a setting: a path as it is, what the program holds by a name, a data set of the hub loaded.

    Args:
        data: as of a trainer.
        name: for messages.
        split: of a hub data set, or of a `DatasetDict`.
    """
    if isinstance(data, list) and data and all(isinstance(each, str | os.PathLike) for each in data):
        return ",".join(map(os.fspath, data))
    if not isinstance(data, str | os.PathLike):
        return give(name, data[split] if isinstance(data, dict) and split in data else data)
    text = os.fspath(data)
    if HUB_NAME.fullmatch(text) and not Path(text).exists() and not text.endswith(DATA_FILES):
        from .config.given_files import located

        return text if located(text).exists() else give(name, _from_hub(text, name, split))
    return text


def _from_hub(text: str, name: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(text, split=split)
    except Exception as error:  # of any kind: the hub's, the network's, the reader's
        raise DataError(f"{name} {text!r} is no file here, and of the hub (split {split}): {error}") from error


def name_of(function: Any) -> str:
    """A name for metrics."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; a lambda under a name that a column of metrics can have."""
    if getattr(function, "__name__", "") != "<lambda>":
        return function

    @functools.wraps(function)
    def reward(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    reward.__name__ = reward.__qualname__ = "reward"
    return reward


def reward_settings(rewards: Any, weights: Sequence[float] | None = None) -> dict[str, Any]:
    """Settings of the section `reward` for rewards as a trainer takes them. Raises ConfigError."""
    if isinstance(rewards, Mapping):
        numbers = all(isinstance(each, int | float) for each in rewards.values())
        return {"components": dict(rewards)} if numbers else {"reward_recipe": json.dumps(rewards)}
    if isinstance(rewards, str) and rewards.endswith(SUFFIXES):
        return {"reward_recipe": rewards}
    listed = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    if weights is not None and len(weights) != len(listed):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(listed)} rewards")
    entries = [_reward_entry(each) for each in listed]
    found: dict[str, list[str]] = {}
    for kind, text, _ in entries:
        found.setdefault(kind, []).append(text)
    scorers = found.pop("rule", [])
    settings: dict[str, Any] = {REWARD_SETTINGS[kind]: ",".join(texts) for kind, texts in found.items()}
    if scorers and not found:
        return {"components": dict(zip(scorers, weights or [1.0] * len(scorers)))}
    if scorers or weights is not None:
        weighed = zip(entries, weights or [1.0] * len(entries))
        positions = {text: str(position) for position, text in enumerate(found.get("model", []))}
        recipe = [[kind, positions.get(text, key), float(weight)] for (kind, text, key), weight in weighed]
        settings["reward_recipe"] = json.dumps({"*": recipe})
    return settings


REWARD_SETTINGS = {"func": "reward_fn", "remote": "remote_rm_url", "model": "reward_pretrain"}


def _reward_entry(reward: Any) -> tuple[str, str, str]:
    """(kind, text of the setting, key in a recipe) of one reward."""
    if isinstance(reward, os.PathLike):
        reward = os.fspath(reward)
    if isinstance(reward, str):
        if ".py:" in reward:
            return "func", reward, reward.rpartition(":")[2]
        if "://" in reward or reward.endswith(".py"):
            return "remote", reward, reward
        return ("rule" if reward in registry.scorers else "model"), reward, reward
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(reward, torch.nn.Module):
        return "model", give(type(reward).__name__, reward), ""
    if callable(reward):
        return "func", give(name_of(reward), _named(reward)), name_of(reward)
    raise ConfigError(
        f"a reward is a function, a module, a URL, path.py:name, a scorer or a folder, not a {type(reward).__name__}"
    )


# -- loaded models ---------------------------------------------------------------------------------------------------


@contextmanager
def saved(model: Any, processor: Any = None) -> Iterator[Path]:
    """Inside, a loaded model or pipeline lies in a folder of the cache that its weights name; it is removed afterwards.

    The first rank of a host writes it, the others wait. Raises ConfigError for adapters, and without a processor.
    """
    from .runtime.files import cache_root

    if type(model).__name__.startswith("Peft"):
        raise ConfigError("model has adapters: give get_base_model() of it, and lora_rank for new ones")
    if not hasattr(model, "components") and processor is None:
        raise ConfigError("a loaded model comes with its processor (or tokenizer): model=(model, processor)")
    folder = cache_root() / "given" / _digest(model)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first and not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent))
        for part in (model, processor):
            if part is not None:
                part.save_pretrained(staging)
        os.replace(staging, folder)
    ends = time.monotonic() + SAVING_LIMIT
    while not folder.is_dir() and time.monotonic() < ends:
        time.sleep(0.1)
    try:
        yield folder
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _digest(model: Any) -> str:
    """The weights in a few letters, the same on every rank."""
    import torch
    import xxhash

    digest = xxhash.xxh3_128()
    for part, module in sorted((getattr(model, "components", None) or {"": model}).items()):
        for name, tensor in module.state_dict().items() if isinstance(module, torch.nn.Module) else ():
            digest.update(f"{part}.{name}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# -- results, evaluation, samples ------------------------------------------------------------------------------------


def _result(trainer: Any, history: _History) -> Result:
    from .trainer.run_state import final_folder

    output = trainer.settings.output
    folder, final = Path(output.output_dir), final_folder(output)
    checkpoint = final if final.is_dir() else trainer.state.manager.find_latest()
    report = folder / "report.html"
    last = [each[-1] for each in (history.steps, history.evaluations) if each]
    metrics = {name: value for each in last for name, value in each.items()}
    return Result(
        metrics | {"step": trainer.step}, history.steps, history.evaluations, folder, checkpoint,
        report if report.is_file() else None, trainer.state.signalled(),
    )  # fmt: skip
