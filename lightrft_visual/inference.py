"""What a checkpoint does: `evaluate` on held-out prompts, `sample` answers or images."""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf

from .api import FlowGRPOTrainer, GRPOTrainer
from .arguments import by_path, data_of, name_environment, saved, split_of, written_once
from .config import registry
from .config.command_line import FALSE_WORDS, NULL_WORDS
from .config.diffusion import PARTS, lora_folders
from .config.idle import OF_ENGINES, OVERLONG_SIZES
from .config.leaves import names_of
from .config.load import CONFIG_DIRS
from .config.recipes import SUFFIXES, LayerReader, load_plugins
from .config.shared import DistributedConfig, GuardConfig, RewardConfig
from .config.vl import DataConfig
from .errors import ConfigError, nearest, refused_as
from .given import forget, names_given
from .runtime.presence import ranks_started

PIPELINE = "model_index.json"
SETTINGS = "config.resolved.yaml"  # of a run
STATE = "run_state_rank0.safetensors"  # of a checkpoint of a run
# Of a run's configuration, for its model alone.
KEPT = ("model", "data", "reward", "rollout", "episodes", "sampling", "guard", "plugins")
MEASURED = {"train": ("seed",), "output": ("eval_seed", "eval_samples_per_prompt")}  # and this, without a suite
# What a run may ask for beside its model, and an evaluation has no use for.
LEFT_OUT = {
    "data": ("response_key", "prompt_data_probs", "pair_data", "chosen_key", "rejected_key"),
    "rollout": (
        "rollout_batch_size", "dynamic_sampling", "noisy_rollout_share", "noisy_rollout_strength", "offload_trainer",
        "offload_reference", "image_dependence_every",
    ),
    "model": (
        "pretrain", "tokenizer_path", "critic_pretrain", "teacher_pretrain", "lora_rank", "lora_alpha",
        "lora_dropout", "target_modules", "target_parameters", "freeze_prefix", "trainable_models",
    ),
    "sampling": (
        "rollout_batch_size", "n_samples_per_prompt", "trajectory", "sde_window_size", "noise_level", "same_latent",
        "cuda_graphs",
    ),
}  # fmt: skip
NO_TRAINING = {"max_steps": 1, "report": False, "save_trajectories": False, "use_wandb": False,
               "use_tensorboard": False, "watch": False, "policy": "warn", "keep_best": False,
               "plan": "force"}  # fmt: skip
UNJUDGED: dict[str, Any] = {"gold_recipe": None, "gold_fn": None}


@dataclass(frozen=True)
class Checkpoint:
    """A folder with what its run says of it. run: the configuration of the run, {} where it is neither beside it nor,
    of one that a trainer saved, inside."""

    path: str
    run: Mapping[str, Any]
    resumable: bool
    base: Any = None

    @classmethod
    def of(cls, checkpoint: str | os.PathLike[str], base: Any = None) -> Checkpoint:
        """Raises ConfigError for a checkpoint of a run without its configuration, and for the folder of a run or a name
        in it that is not there, with the names that are."""
        path = Path(checkpoint)
        inside, beside = path / SETTINGS, path.parent / SETTINGS
        resumable, exported = (path / STATE).is_file(), (path / "manifest.json").is_file()
        saved = inside.is_file() and exported  # by a trainer's `save`
        if (inside.is_file() and not saved) or (beside.is_file() and not path.exists()):
            told, folder = ("is the folder of a run", path) if path.exists() else ("does not exist", path.parent)
            there = ", ".join(map(str, sorted(folder.glob("checkpoint-*"))[-3:])) or "it has none yet"
            raise ConfigError(f"{path} {told}; name a checkpoint of the run: {there}")
        file = inside if saved else beside
        run = OmegaConf.to_container(OmegaConf.load(file)) if path.is_dir() and file.is_file() else {}
        if not resumable and not path.name.startswith("checkpoint-") and not exported:
            run = {}  # a model of others, beside which a run has its checkpoints
        if resumable and not run:
            raise ConfigError(f"{path} is a checkpoint of a run, and the run's config.resolved.yaml is not beside it")
        return cls(os.fspath(checkpoint), run, resumable, base)

    @property
    def draws(self) -> bool:
        """Whether it is a diffusion model's."""
        return "sampling" in self.run or (Path(self.path) / PIPELINE).is_file() or self.adapted

    @property
    def adapted(self) -> bool:
        """Whether it holds adapters of a pipeline alone."""
        return bool(lora_folders(self.path))

    @property
    def image_key(self) -> str:
        """The column of images that are given beside prompts: of a diffusion model that of the run's data."""
        return ((self.run.get("data") or {}).get("image_key") or "input_image") if self.draws else "images"

    @contextmanager
    def model(self, bf16: bool | None = None) -> Iterator[str]:
        """The folder of the model; adapters of a pipeline are joined with their base, once on a host. bf16: None: as
        the run had it."""
        if not self.adapted:
            yield self.path
            return
        from .models.diffusion.families.base import fuse_lora
        from .models.diffusion.opening import save_text_length

        bf16 = self.run.get("model", {}).get("bf16", False) if bf16 is None else bf16

        def write(folder: Path) -> None:
            pipeline = self.pipeline(bf16, complete=False)
            fuse_lora(pipeline).warn("bf16=False (--bf16 false) evaluates all of it")
            pipeline.save_pretrained(folder)
            if (length := self.text_length()) is not None:
                save_text_length(os.fspath(folder), length)

        files = [(os.fspath(each), each.stat().st_mtime_ns) for each in sorted(Path(self.path).resolve().rglob("*"))]
        base = self._trained_on()
        told = f"{base if isinstance(base, str) else type(base).__name__} {bf16} {files}"
        with written_once(hashlib.sha256(told.encode()).hexdigest()[:32], write) as folder:
            yield os.fspath(folder)

    def pipeline(self, bf16: bool = False, complete: bool = True) -> Any:
        """The diffusers pipeline, adapters beside their base; complete: also with what only its own call needs.
        Raises ConfigError where the base is not known, or does not load."""
        import torch

        from .models.diffusion.families.base import join_lora
        from .models.diffusion.layers import load_pipeline
        from .models.diffusion.opening import adapter_of
        from .models.diffusion.wan_parts import load_wan_parts
        from .models.weight_files import LOADING

        dtype = torch.bfloat16 if bf16 else torch.float32
        load_plugins(self.run.get("plugins"))  # which may have the family
        base = self._trained_on() if self.adapted else self.path
        with LOADING:
            if isinstance(base, str):
                family = adapter_of(base)
                with refused_as(ConfigError, f"model {base} cannot be loaded"):
                    if base.endswith(PARTS):
                        pipeline = load_wan_parts(base, dtype, self.run.get("model", {}).get("tokenizer_path"))
                    else:
                        pipeline = load_pipeline(
                            base, dtype, {} if complete else family.loading(), family.pipeline_type
                        )
            else:
                pipeline = copy.deepcopy(base).to(dtype)
            if self.adapted:
                join_lora(pipeline, Path(self.path))
        return pipeline

    def text_length(self) -> int | None:
        """Tokens of the T5 or LLM encoder's inputs in the run, None for the pipeline's own number."""
        from .models.diffusion.opening import saved_text_length

        if not self._family().takes_text_length:
            return None
        told = self.run.get("model", {}).get("max_sequence_length")
        folder = self._trained_on() if self.adapted else self.path
        told = told or (saved_text_length(folder) if isinstance(folder, str) else None)
        if told or not self.adapted:
            return told
        return self._family().default_text_length

    def frame_rate(self) -> float | None:
        """Frames a second that its videos are shown at; None where its family says none."""
        family = self._family()
        return (self.run.get("sampling") or {}).get("frame_rate") or family.frame_rate or family.plays_at

    def _family(self) -> Any:
        from .models.diffusion.opening import adapter_of, named_family

        folder = self._trained_on() if self.adapted or self.resumable else self.path
        return adapter_of(folder) if isinstance(folder, str) else named_family(type(folder).__name__)

    def _trained_on(self) -> Any:
        """The folder or name of what adapters were trained on, or the pipeline that was given for it."""
        run = self.run.get("model", {})
        base = self.base or run.get("pretrain")
        if base is None:
            raise ConfigError(f"{self.path} holds adapters: name what they were trained on by base")
        if not isinstance(base, str | os.PathLike):
            return base
        path = registry.pipeline_folder(os.fspath(base), run.get("family", "auto"))
        if os.path.isabs(path) and not os.path.exists(path):
            raise ConfigError(f"{path}, on which the adapters of {self.path} were trained, is gone: give base")
        return path


@dataclass
class _RunsRewards(RewardConfig):
    """Of a run, on other data than its own."""

    every_label: ClassVar[bool] = False


@dataclass
class _RunsGuard(GuardConfig):
    """Likewise, of its gold."""

    def gold(self, reward: RewardConfig) -> RewardConfig | None:
        """By rewards of a run."""
        return super().gold(_RunsRewards(**vars(reward)))


@contextmanager
def _configured(
    checkpoint: Checkpoint, eval_dataset: Any, rewards: Any, settings: dict[str, Any], suite: str | Path | None = None,
    called: str = "eval_dataset",
) -> Iterator[Any]:  # fmt: skip
    """How a checkpoint is evaluated; a suite has data and rewards of its own. called: name of the data in errors."""
    if "config" in settings:
        raise ConfigError("config is of a trainer: give settings by their names, or a recipe as suite")
    kind = FlowGRPOTrainer if checkpoint.draws else GRPOTrainer
    name_environment(settings)
    said = by_path(settings, kind.root.schema)
    asked = {path.rpartition(".")[2]: value for path, (_, value) in said.items()}
    with ExitStack() as lent:
        scratch = lent.enter_context(tempfile.TemporaryDirectory(prefix="lightrft_visual_"))
        bf16 = asked.get("bf16")
        bf16 = bf16.lower() not in FALSE_WORDS if isinstance(bf16, str) else bf16  # of a command line
        model = lent.enter_context(checkpoint.model(bf16))
        run = _without_idle(checkpoint.run, asked)
        if checkpoint.resumable:
            tree, own = dict(run), _resuming(checkpoint, run)
        else:
            tree = _of_its_model(checkpoint.run, run, suite is None)
            own = {"pretrain": model} | (DRAWING if checkpoint.draws else _answering(run, eval_dataset))
        own = NO_TRAINING | {"output_dir": os.path.join(scratch, "run")} | own
        if rewards is not None or suite is not None:
            tree.pop("reward", None)
        if suite is not None:
            tree.pop("data", None)
        others = {"eval_data", "prompt_data"} & asked.keys()
        runs_rows = eval_dataset is None and suite is None and not others  # its gold need not fit others
        runs_gold = runs_rows and not asked.keys() & UNJUDGED.keys()
        if not runs_gold:
            tree.pop("guard", None)
        if eval_dataset is not None:  # in the place of all that the run was trained on
            tree["data"] = {k: v for k, v in tree.get("data", {}).items() if k not in LEFT_OUT["data"]}
            with names_given() as rows:
                named_rows = data_of(eval_dataset, called, split_of(said, "eval_split"))
            lent.callback(forget, rows)
            own |= dict.fromkeys(("prompt_data", "eval_data"), named_rows)
        recipe = os.path.join(scratch, "run.yaml")
        OmegaConf.save(OmegaConf.create({k: v for k, v in tree.items() if v}), recipe)
        suite = None if suite is None else os.fspath(suite)
        named = suite is None or suite.endswith(SUFFIXES) or "/" in suite
        recipes = [recipe, *([] if suite is None else [suite if named else f"suite/{suite}"])]  # shipped, or a file
        for each in recipes[1:]:
            _check_suite(each, checkpoint, kind.root.schema)
        base = checkpoint.base if checkpoint.resumable else None
        trainer = lent.enter_context(kind(base, rewards, config=recipes, **own | settings))
        if rewards is None and suite is None:
            trainer.config.reward = _RunsRewards(**vars(trainer.config.reward))
        if not checkpoint.draws and not checkpoint.resumable and "offload_trainer" not in asked:
            trainer.config.rollout.offload_trainer = _offloads(trainer.config.distributed)
        if not runs_rows and trainer.config.data.eval_data:  # a built-in task that nobody named has gold of its own
            trainer.config.data = _held_out_alone(trainer.config)
        if runs_gold:
            trainer.config.guard = _RunsGuard(**vars(trainer.config.guard))
        lent.enter_context(trainer.model_on_disk())
        yield trainer.config


def _resuming(checkpoint: Checkpoint, run: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with which a checkpoint of a run is read, beside those of the run."""
    if "algorithm" not in checkpoint.run:
        raise ConfigError(f"{checkpoint.path} is a checkpoint of a supervised run: name its checkpoint-final")
    from .runtime.checkpoint.manifest import read_manifest  # with torch, which wrong settings need not wait for

    own: dict[str, Any] = {"resume_from": os.path.abspath(checkpoint.path), "ckpt_path": None, "save_path": None}
    own |= {"max_steps": run["train"]["max_steps"]}
    own |= {"cfg_in_training": True} if run["algorithm"].get("cfg_in_training") is False else {}
    own |= {"cuda_graphs": False} if checkpoint.draws else {}
    named = (read_manifest(Path(checkpoint.path))["model"] or {}).get("pretrain")
    return own | ({"pretrain": named} if named in registry.checkpoint_resolvers else {})  # its folder is not its name


def _of_its_model(run: Mapping[str, Any], used: Mapping[str, Any], measured: bool) -> dict[str, Any]:
    """What an evaluation of an exported model takes of its run.

    Args:
        run: its configuration.
        used: the same without what is idle.
        measured: whether with MEASURED.
    """
    tree = {name: used[name] or {} for name in KEPT if name in used}
    for section, names in MEASURED.items() if measured else ():
        tree[section] = {k: v for k, v in (run.get(section) or {}).items() if k in names}
    for section, names in LEFT_OUT.items():
        tree[section] = {k: v for k, v in tree.get(section, {}).items() if k not in names}
    if (run.get("data") or {}).get("pair_data") and tree["data"].get("eval_data"):
        tree["data"] |= {"prompt_data": tree["data"]["eval_data"], "prompt_split": tree["data"]["eval_split"]}
    return tree


def _offloads(zero: DistributedConfig) -> bool:
    """Whether fp32 weights of Adam, which does not train, would take the engine's room."""
    from deepspeed.accelerator import get_accelerator

    return zero.zero_stage > 0 and not zero.adam_offload and get_accelerator().device_name() != "cpu"


def _held_out_alone(config: Any) -> Any:
    """The data of an evaluation, in which prompts to train on are those held out, no more of them than are read."""
    data, sizes = config.data, config.sampling if hasattr(config, "sampling") else config.rollout
    most = max(data.max_eval_samples or data.max_samples, sizes.rollout_batch_size, ranks_started())
    return replace(data, prompt_data=data.eval_data, prompt_split=data.eval_split, max_samples=most)


def _check_suite(recipe: str, checkpoint: Checkpoint, schema: type) -> None:
    """Raise ConfigError where it has settings of the other kind of model."""
    others = "rollout." if checkpoint.draws else "sampling."
    if any(each.name.startswith(others) for each in LayerReader(names_of(schema), CONFIG_DIRS).read(recipe)):
        kinds = ("answer", "draws") if checkpoint.draws else ("draw", "answers")
        raise ConfigError(f"{recipe} is of models that {kinds[0]}, and that of {checkpoint.path} {kinds[1]}")


def _without_idle(run: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run without what nothing reads beside the settings `asked` for."""
    engine = asked.get("engine_type") not in (None, (run.get("rollout") or {}).get("engine_type"))
    plain = str(asked.get("apply_chat_template")).lower() in FALSE_WORDS
    idle = {"rollout": OF_ENGINES if engine else (), "data": ("system_prompt", "chat_template_kwargs") if plain else ()}
    found = dict(run)
    if emptied := [name for name in ("environment", "tools") if asked.get(name) in ("", *NULL_WORDS, [], ())]:
        found["episodes"] = (found.get("episodes") or {}) | dict.fromkeys(emptied)
        given = asked | dict.fromkeys(emptied)
        if not any(given.get(name) or found["episodes"].get(name) for name in ("environment", "tools")):
            found["episodes"] = None
            idle["algorithm"] = ("overlong_buffer", *OVERLONG_SIZES)  # sized for episodes
    return {
        name: {k: v for k, v in section.items() if k not in idle[name]} if section and name in idle else section
        for name, section in found.items()
    }


def _answering(run: Mapping[str, Any], prompts: Any) -> dict[str, Any]:
    """Settings of a run that is not trained, of as many prompts at once as there are, at most 8. run: the configuration
    of the run whose engine is used, which in fewer bits asks for a tis_mode."""
    rollout = run.get("rollout") or {}
    coarse = rollout.get("engine_quantization") or rollout.get("engine_kv_cache_dtype", "").startswith("fp8")
    world = ranks_started()
    few = min(8, len(prompts)) if isinstance(prompts, list) else 8
    size = max(world, few // world * world)
    return {"advantage_estimator": "reinforce", "rollout_batch_size": size, "groups_per_update": size,
            "init_kl_coef": 0.0} | ({"tis_mode": "token"} if coarse else {})  # fmt: skip


DRAWING = {"diffusion_algorithm": "rwr", "lora_rank": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 8,
           "groups_per_update": 1}  # fmt: skip


@contextmanager
def _on_disk(model: Any) -> Iterator[str | os.PathLike[str]]:
    """A folder or a name; a loaded model or pipeline, alone or with its processor, lies in a folder inside."""
    loaded, processor = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if isinstance(loaded, str | os.PathLike):
        yield loaded
        return
    if not hasattr(loaded, "save_pretrained"):
        raise ConfigError(f"model is a {type(loaded).__name__}: give a hub name, a folder, or what is loaded of one")
    with saved(loaded, processor) as folder:
        yield folder


def evaluate(
    model: Any, eval_dataset: Any = None, reward_funcs: Any = None, *, suite: str | Path | None = None,
    base: Any = None, **settings: Any,
) -> dict[str, float]:  # fmt: skip
    """Metrics of a model on held-out prompts, as a run's own evaluation measures them.

    A checkpoint-… of a run, or its save_path, brings the run's settings (config.resolved.yaml beside it); those given
    here win.

    Args:
        model: an exported model (checkpoint-final), a checkpoint of a run (checkpoint-000100), the folder of a
            model or pipeline, a hub name, a loaded pipeline, or (model, processor).
        eval_dataset: as of a trainer; default: that of the run.
        reward_funcs: likewise. Functions that a run was given from Python are given again.
        suite: a published protocol by name (geneval, ocr, drawbench, geometry3k, geometry3k_verl), or a recipe of your
            own: prompts, sampler, seed and scorer. What is given beside it wins.
        base: the model that a run trained, for adapters and for checkpoints of a run, where it was given from Python.
        **settings: of the run, such as eval_samples_per_prompt. A run's averaged weights are evaluated where its own
            evaluations did so; eval_ema=False leaves them.
    """
    return evaluation(model, eval_dataset, reward_funcs, suite=suite, base=base, **settings)["metrics"]


def evaluation(
    model: Any, eval_dataset: Any = None, reward_funcs: Any = None, *, suite: str | Path | None = None,
    base: Any = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """`evaluate` with what its `metrics` were made with: `observe.conditions`, `checkpoint` and `suite`.

    Args: as of `evaluate`.
    """
    from .launch import started

    with _on_disk(model) as checkpoint:
        with _configured(Checkpoint.of(checkpoint, base), eval_dataset, reward_funcs, settings, suite) as config:
            with started(config) as trainer:
                from .observe.conditions import conditions
                from .trainer.features.conditions import held_out

                found = conditions(config, held_out(trainer.parts.evaluation))
                own = {"checkpoint": os.fspath(checkpoint), "suite": suite}
                return {"metrics": dict(trainer.evaluate()), **own, **found}


def sample(
    model: Any, prompts: Any, images: Sequence[Any] | None = None, n: int = 1, *, seed: int = 0, base: Any = None,
    **settings: Any,
) -> list[list[Any]]:  # fmt: skip
    """What a model answers or draws: for each prompt n texts, n images, or n videos as lists of frames.

    Args:
        model: as of `evaluate`.
        prompts: texts, or rows as of a data set (with their images).
        images: for each prompt its image, a list of them, which win over the row's own, or None: the row's own.
        n: samples of each prompt.
        seed: of what is drawn.
        base: as of `evaluate`.
        **settings: of the run, such as temperature (0: greedy) and generate_max_len; of a diffusion model the
            arguments of its pipeline, such as num_inference_steps, and bf16 (default: as in the run).
    """
    if not isinstance(n, Integral) or n < 1:
        raise ConfigError(f"n is {n!r}: how many samples of each prompt, 1 or more")
    n = int(n)  # of NumPy, too
    with _on_disk(model) as checkpoint:
        found = Checkpoint.of(checkpoint, base)
        listed = _asked(prompts, images, found.image_key)
        if found.draws and found.resumable:
            with _exported(found, settings) as final:
                return _drawn(final, listed, n, seed, settings, images is not None)
        if found.draws:
            return _drawn(found, listed, n, seed, settings, images is not None)
        return _answered(found, listed, n, seed, _columns(listed, images is not None) | settings)


def _asked(prompts: Any, images: Any, image_key: str) -> list[Any]:
    """Prompts with their images in this column, as rows. One text, row or conversation alone may come with its images
    alone."""
    alone = isinstance(prompts, str | Mapping)
    if not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts is a {type(prompts).__name__}: give a text, a row, or a list of them")
    listed = [prompts] if alone else list(prompts)
    if listed and isinstance(listed[0], Mapping) and "role" in listed[0]:
        alone, listed = True, [listed]
    rows = [{"prompt": each} if isinstance(each, str | list) else each for each in listed]
    if images is None:
        return rows
    images = [images] if alone else images
    if isinstance(images, str) or not hasattr(images, "__len__"):
        raise ConfigError(f"images is a {type(images).__name__}: give a list with those of each prompt")
    if len(images) != len(rows):
        raise ConfigError(f"{len(rows)} prompts come with images for {len(images)}")
    return [
        row if each is None else {**row, image_key: list(each) if isinstance(each, list | tuple) else [each]}
        for row, each in zip(rows, images)
    ]


def _columns(prompts: Sequence[Any], shown: bool) -> dict[str, Any]:
    """Settings by which rows are read: what holds no more than a text and its media in our own names, so that a run's
    columns are not asked of texts; else the run's own. shown: whether images are given beside them."""
    if all(isinstance(each, Mapping) and each.keys() <= {"prompt", "images", "videos", "draw"} for each in prompts):
        usual = {item.name: item.default for item in fields(DataConfig) if item.name.endswith("_key")}
        return usual | {"data_format": "auto"}
    return {"images_key": "images"} if shown else {}


@contextmanager
def _exported(checkpoint: Checkpoint, settings: dict[str, Any]) -> Iterator[Checkpoint]:
    """A checkpoint of a diffusion run as its export would be, with the averaged weights where the run exports them."""
    from .launch import started

    if ranks_started() > 1:
        raise ConfigError(
            f"{checkpoint.path} is what a run resumes from, which one process exports and draws with: name the run's "
            "checkpoint-final to draw on several ranks, or start one"
        )
    own = {name: settings.pop(name) for name in ("eval_ema",) if name in settings}
    with tempfile.TemporaryDirectory(prefix="lightrft_visual_") as folder:
        scored = checkpoint.run["algorithm"].get("diffusion_algorithm") == "reward_fl"  # by what it trains on
        rows, unscored = (None, None) if scored else (_stand_ins(checkpoint), [lambda images: [0.0] * len(images)])
        with _configured(checkpoint, rows, unscored, UNJUDGED | own) as config, started(config) as trainer:
            trainer.export(Path(folder))
        base = checkpoint.base or checkpoint.run["model"]["pretrain"]
        yield replace(checkpoint, path=folder, base=base, resumable=False)


def _stand_ins(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Rows of a rollout in the place of the run's data, which may be gone: its columns with a text, and an image."""
    from PIL import Image

    named = {value for name, value in checkpoint.run["data"].items() if name.endswith("_key") and value}
    row = dict.fromkeys(named, "a") | {checkpoint.image_key: Image.new("RGB", (64, 64))}
    return [row] * checkpoint.run["sampling"]["rollout_batch_size"]


def _answered(
    checkpoint: Checkpoint, prompts: Sequence[Any], n: int, seed: int, settings: dict[str, Any]
) -> list[list[Any]]:
    from .launch import started

    temperature = settings.pop("temperature", None)
    if temperature is not None and not (isinstance(temperature, Real) and temperature >= 0):
        raise ConfigError(f"temperature is {temperature!r}: give 0, which is greedy, or a number above it")
    own: dict[str, Any] = {"max_eval_samples": len(prompts), "on_bad_row": "error", "on_long_prompt": "error"}
    said = by_path(settings, GRPOTrainer.root.schema)
    if fixed := {f"data.{name}" for name in (*own, "eval_data")} & said.keys():
        raise ConfigError(f"{said[min(fixed)][0]} is of runs: sample answers each prompt that it is given")
    own |= UNJUDGED | settings | ({"temperature": float(temperature)} if temperature else {})
    unscored = [lambda completions: [0.0] * len(completions)]
    with _configured(checkpoint, prompts, unscored, own, called="prompts") as config, started(config) as trainer:
        parts = trainer.parts
        evaluation = parts.evaluation
        sampling = replace(evaluation.greedy if temperature == 0 else evaluation.sampling, n=n)
        made = parts.maker.sample(evaluation.prompts, sampling, "eval", seed)
        from .trainer.vl.evaluation import say_failed

        say_failed(made)
        found = [each.text if each.image is None else each.image for each in made]
    return [found[start : start + n] for start in range(0, len(found), n)]


def _drawn(
    checkpoint: Checkpoint, prompts: Sequence[Any], n: int, seed: int, settings: dict[str, Any], beside: bool
) -> list[list[Any]]:
    """beside: whether images were given beside the prompts; rows may have some that this model does not read."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from .data.drawing_prompts import image_column
    from .data.media import load_image
    from .experience.rollouts import media_list

    column = (checkpoint.run.get("data") or {}).get("input_key") or "prompt"
    texts = [each.get(column, each.get("prompt")) if isinstance(each, Mapping) else None for each in prompts]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"a diffusion model draws texts: give each, or a mapping with one under {column!r}")
    cells: list[list[Any]] = [media_list(each.get(image_column(each, checkpoint.image_key))) for each in prompts]
    if beside:  # before anything is loaded
        cells = [[load_image(image) for image in cell] for cell in cells]
    accelerator, model = get_accelerator(), checkpoint.run.get("model") or {}
    if accelerator.device_name() != "cpu" and ranks_started() > 1:  # each on its own; diffusers would take the first
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = accelerator.current_device_name()
    pipeline = checkpoint.pipeline(settings.pop("bf16", model.get("bf16", device != "cpu")))
    pipeline.set_progress_bar_config(disable=True)
    if model.get("vae_tiling"):
        pipeline.vae.enable_tiling()
    if device != "cpu":  # one part at a time, so that what a run trains in shards fits
        pipeline.enable_model_cpu_offload(device=device)
    taken = signature(pipeline.__call__).parameters
    if beside and any(cells) and "image" not in taken:
        raise ConfigError(f"{type(pipeline).__name__} draws from text alone: leave the images out")
    given = [[load_image(image) for image in cell] if "image" in taken else [] for cell in cells]
    run = {**checkpoint.run.get("sampling", {}), "max_sequence_length": checkpoint.text_length()}
    usual = _as_in_the_run(pipeline, run) | _arguments(settings, pipeline)
    if "max_area" in taken and {"height", "width"} <= usual.keys():  # else Kontext draws a megapixel, whatever is asked
        usual.setdefault("max_area", usual["height"] * usual["width"])
    at_once = n if "num_images_per_prompt" in taken else 1  # a video is large alone
    usual |= {"num_images_per_prompt": n} if at_once > 1 else {}
    drawn: list[list[Any]] = []
    for number, (text, shown) in enumerate(zip(texts, given)):
        own = {"image": shown if len(shown) > 1 else shown[0]} if shown else {}
        generators = [torch.Generator().manual_seed(seed + number * n + index) for index in range(n)]
        drawn.append([])
        for first in range(0, n, at_once):
            try:
                out = pipeline(prompt=text, generator=generators[first : first + at_once], **usual | own)
            except ValueError as error:  # such as a height that does not divide
                raise ConfigError(f"{type(pipeline).__name__}: {error}") from error
            except (TypeError, AttributeError) as error:
                if shown or "image" not in taken:
                    raise
                raise ConfigError(f"{type(pipeline).__name__} draws from an image: give it by images") from error
            drawn[-1] += out.images if hasattr(out, "images") else out.frames
    return drawn


def _arguments(settings: Mapping[str, Any], pipeline: Any) -> dict[str, Any]:
    """Settings of `sample` as arguments of a pipeline, which a run's names of the steps are too."""
    taken = signature(pipeline.__call__).parameters
    steps = dict.fromkeys(("num_steps", "eval_num_steps"), "num_inference_steps")
    given = {steps.get(name, name): value for name, value in settings.items()}
    for name in given.keys() - taken.keys():
        near = nearest(name, taken)
        told = f"did you mean {near!r}?" if near else f"it takes {', '.join(taken)}"
        raise ConfigError(f"{name!r} is no argument of {type(pipeline).__name__}; {told}")
    return given


def _as_in_the_run(pipeline: Any, run: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a stock pipeline for what a run's evaluations draw, of those that it takes; what is no argument is
    set in the pipeline. run: its settings."""
    from .models.diffusion.opening import named_family

    names = ("height", "width", "num_frames", "frame_rate", "guidance_scale_2", "max_sequence_length")
    own = {name: run.get(name) for name in names} | {"num_inference_steps": run.get("eval_num_steps")}
    own["output_type"] = "pil"
    family = named_family(type(pipeline).__name__)
    if family.text_length_at and own["max_sequence_length"] is not None:
        setattr(pipeline, family.text_length_at, own["max_sequence_length"])
    if run.get("guidance_scale") is not None:
        own |= family.stock_guidance(pipeline, run["guidance_scale"], run.get("negative_prompt"))
        family.draw_as_evaluated(pipeline, run)
    taken = signature(pipeline.__call__).parameters
    return {name: value for name, value in own.items() if name in taken and value is not None}
