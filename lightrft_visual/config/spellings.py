"""Names beside those of the schema, and the settings they reach: LightRFT's, and those of the commands and files that a
run is started with. Those of other systems are a plug-in's, in the same form (`Spoken`).

An alias is listed only where it means exactly the same. A name whose meaning differs, or that takes other values, is
listed in ``DIFFERENT`` with what to write instead, so that it is refused with advice and never quietly reinterpreted.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..errors import ConfigError
from . import registry
from .diffusion import DiffusionRunConfig
from .placement import AsyncConfig
from .sft import SFTRunConfig
from .shared import FULL, accumulated
from .vl import RunConfig


@dataclass(frozen=True)
class Translation:
    """How a setting of another system is read.

    Args:
        like: a setting here that takes the same kind of value.
        read: its value to the settings that it stands for. Raises ConfigError for a value that means nothing here.
        about: for `--help`.
    """

    like: str
    read: Callable[[Any], dict[str, Any]]
    about: str


def by_word(known: Mapping[str, Mapping[str, Any]], refused: str) -> Callable[[Any], dict[str, Any]]:
    """A `read` of a Translation for settings that take a few words. refused: what is said of others, {0!r} in it."""

    def read(value: Any) -> dict[str, Any]:
        if (word := str(value)) in known or (word := word.lower()) in known:
            return dict(known[word])
        raise ConfigError(refused.format(value))

    return read


def _reward_model_path(folder: Any) -> dict[str, Any]:
    folder = os.path.expanduser(str(folder))
    return {"differentiable_reward": "face_similarity", "differentiable_kwargs.embedder": folder}


_model_name = by_word(
    {"wan2_2": {"family": "wan_i2v"}},
    "model_name is {0!r}; of ROLL's models there is wan2_2. A path or hub name is --pretrain",
)
_extra_inputs = by_word(
    {"input_image": {"image_key": "input_image"}},
    "extra_inputs is {0!r}; of ROLL's inputs there is input_image, the first frame",
)
_origin_paths = by_word(
    dict.fromkeys(("", "none", "null"), {}),
    "model_id_with_origin_paths names files of a hub, which are not fetched: name local ones by --model_paths",
)
_eval_enable = by_word({"true": {}, "false": {"max_eval_samples": 0}}, "eval.enable is {0!r}; it is true or false")
_precision = by_word({"bf16": {"bf16": True}, "fp32": {"bf16": False}}, "precision is {0!r}; there are bf16 and fp32")
TRANSLATIONS: dict[str, dict[str, Translation]] = {
    "DiffusionRunConfig": {
        "model_name": Translation("family", _model_name, "wan2_2 is --family wan_i2v (ROLL)"),
        "extra_inputs": Translation("image_key", _extra_inputs, "input_image is --image_key input_image (ROLL)"),
        "reward_model_path": Translation(
            "pretrain", _reward_model_path, "the embedder of --differentiable_reward face_similarity (ROLL)"
        ),
        "model_id_with_origin_paths": Translation("image_root", _origin_paths, "null only (ROLL)"),
        "eval.enable": Translation("bf16", _eval_enable, "false is --max_eval_samples 0 (VRL)"),
        "precision": Translation("pretrain", _precision, "bf16 is --bf16 (VRL)"),
    },
}


@dataclass(frozen=True)
class Removed:
    """instead: one line that stands behind 'is gone: '. harmless: values whose run is the same without the setting."""

    instead: str
    harmless: tuple[Any, ...] = ()


# (the setting's own name, or its path where another setting has the same name; instead; values that are harmless)
REMOVED: dict[str, Removed] = {
    name: Removed(instead, tuple(harmless))
    for name, instead, *harmless in (
        ("force", "use --plan force", False),
        ("train_while_scoring", "leave it out; training waits for all rewards, and remote scorers work beside "
         "generation and forward passes", True, False),
        ("ask_key", "leave it out; score drawings by scorers of images, or by a judge", ""),
        ("redraw_key", "leave it out; score answers by rules or by a judge", ""),
        ("embedded_tie_embeddings", "leave it out; the embedded models have embeddings of their own", False),
        ("parity_samples", "leave it out; probes have 4 prompts, and --parity_every 0 turns the gate off", 4),
        ("noisy_rollout_decay", "leave it out; the noise vanishes by the paper's schedule", 30),
        ("noisy_rollout_midpoint", "leave it out; the noise vanishes by the paper's schedule", 0.67),
        ("selective_replay_alpha", "leave it out; samples are drawn in proportion to their advantage", 1),
        ("max_nonfinite_steps", "leave it out; a run ends after 3 skipped steps in a row", 3),
        ("learn_steps", "leave it out; the guard learns its bands from 5 steps", 5),
        ("band_width", "leave it out; the guard's bands reach 6 standard deviations", 6),
        ("reward_ray_actors", "use --distributed.resources.reward_num_workers", 1),
        ("homogeneous_batches", "use --prompt_mixing turns, with a file of questions and one of drawings", False),
        ("reward_weights_file", "leave it out; weights stand in reward_recipe, and hold for a run: resume it with "
         "others", None),
        ("reward_num_cpus", "leave it out; Ray reserves no cores for rewards", 0),
        ("worker_timeout", "leave it out; a worker that does not answer for an hour is started again", 3600),
        ("prompt_cache_gib", "leave it out; encoded prompts are kept in memory", 2),
        ("ema_warmup", "leave it out; the average is warmed up, as in Flow-GRPO's code", True),
        ("pairs_per_prompt", "leave it out; all samples of a prompt make pairs", None),
    )
}  # fmt: skip


def removed(name: str) -> Removed | None:
    """The entry of a setting that is gone, under any of its spellings; None for other names."""
    plain = name.replace("-", "_")
    own = plain.rpartition(".")[2]
    return next((REMOVED[each] for each in (plain, own, own.removeprefix("no_")) if each in REMOVED), None)


# The recipe of the embedded model, or how it follows from the settings, those of the recipe it named before among them.
Preset = str | Callable[[DictConfig], str]


def _of_algorithm(tree: DictConfig) -> str:
    entry = registry.diffusion_algorithms[tree.algorithm.diffusion_algorithm]
    return entry.embedded if tree.data.pair_data is None else f"{entry.embedded}_offline"


def _of_task(tree: DictConfig) -> str:
    if tree.model.embedded_family == "janus":
        return "embedded_unified"
    name = tree.data.prompt_data
    if name in registry.tasks and registry.tasks[name].preset is not None:
        return registry.tasks[name].preset
    return "embedded_vl_updates" if _several_updates(tree) else "embedded_vl"


def _several_updates(tree: DictConfig) -> bool:
    """Whether a rollout is trained on in more than one optimizer step."""
    train, samples = tree.train, tree.rollout.rollout_batch_size * tree.rollout.n_samples_per_prompt
    size = train.train_batch_size or samples
    if train.groups_per_update is not None:
        size = train.groups_per_update * tree.rollout.n_samples_per_prompt
    elif train.gradient_accumulation_steps is not None:
        size = accumulated(train.gradient_accumulation_steps, train.micro_train_batch_size)
    return samples // max(1, size) * train.max_epochs > 1


DIFFUSION_PRESET: Preset = _of_algorithm
VL_PRESET: Preset = _of_task


@dataclass(frozen=True)
class Root:
    """kind is the folder of its recipes below experiment/."""

    kind: str
    schema: type[RunConfig | DiffusionRunConfig | SFTRunConfig]
    preset: Preset


ROOTS = (
    Root("vl", RunConfig, VL_PRESET),
    Root("diffusion", DiffusionRunConfig, DIFFUSION_PRESET),
    Root("sft", SFTRunConfig, "embedded_sft"),
)


def preset_of(tree: DictConfig) -> str:
    """The preset of the kind of run that a tree of settings is of."""
    preset = next(root.preset for root in ROOTS if issubclass(OmegaConf.get_type(tree), root.schema))
    return preset if isinstance(preset, str) else preset(tree)


# Algorithms as the command and the trainers for Python name them: the kind of run, and the settings that a name stands
# for; recipes and flags win over them.
ALGORITHMS: dict[str, tuple[Root, dict[str, Any]]] = {
    "grpo": (ROOTS[0], {"advantage_estimator": "group_norm"}),
    "ppo": (ROOTS[0], {"advantage_estimator": "gae"}),
    "rloo": (ROOTS[0], {"advantage_estimator": "rloo"}),
    "unified": (ROOTS[0], {"embedded_family": "janus", "engine_type": "hf"}),
    "sft": (ROOTS[2], {}),
    "flow-grpo": (ROOTS[1], {"diffusion_algorithm": "flow_grpo"}),
    "nft": (ROOTS[1], {"diffusion_algorithm": "diffusion_nft"}),
    "ddpo": (ROOTS[1], {"diffusion_algorithm": "ddpo"}),
    "reward-fl": (ROOTS[1], {"diffusion_algorithm": "reward_fl"}),
    "dpo": (ROOTS[1], {"diffusion_algorithm": "diffusion_dpo"}),
}


# alias -> leaf name, or several leaf names that share the values given. An alias may lead to another alias: the first
# name on the way that the schema has is the one that is set. Aliases whose leaf a schema lacks do not exist there.
ALIASES: dict[str, str | tuple[str, ...]] = {
    # LightRFT, and what several systems call it
    "lr": "learning_rate",
    "learning_rate": "actor_learning_rate",
    "num_train_epochs": "num_episodes",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_ratio": "lr_warmup_ratio",
    "lr_warmup_steps": "warmup_steps",
    "weight_decay": "l2",
    "max_grad_norm": "max_norm",
    "loss": "policy_loss",
    "eps_clip_low_high": ("eps_clip", "eps_clip_high"),
    "entropy_loss_coef": "entropy_coef",
    "vllm_mem_util": "engine_mem_util",
    "vllm_enable_sleep": "enable_engine_sleep",
    "engine.enable_sleep": "enable_engine_sleep",
    "vllm_kv_cache_dtype": "engine_kv_cache_dtype",
    "save_dir": "output_dir",
    "resume": "load_checkpoint",
    "images_key": "image_key",  # of vision-language runs
    # ROLL and diffusers
    "num_inference_steps": "num_steps",
    "per_device_train_batch_size": "micro_train_batch_size",
    # VRL
    "trainer.output_dir": "output_dir",
    "trainer.resume_from": "resume_from",
    "trainer.save_freq": "save_steps",
    "data.manifest": "prompt_data",
    "data.eval_manifest": "eval_data",
    "rollout.n": "n_samples_per_prompt",
    "rollout.rollout_batch_size": "rollout_batch_size",
    "rollout.sample_batch_size": "micro_rollout_batch_size",
    "actor.gradient_accumulation_steps": "groups_per_update",  # it accumulates prompt groups, not micro-batches
    "actor.optim.lr": "learning_rate",
    "eval.manifest": "eval_data",
    "eval.freq": "eval_steps",
    "eval.num_steps": "eval_num_steps",
    "eval.max_prompts": "max_eval_samples",
    "eval.seed": "eval_seed",
    "eval.use_ema": "eval_ema",
    **{
        f"distributed.resources.{side}.{name}": f"{side}_{name}"
        for side in ("trainer", "rollout", "reward")
        for name in ("num_gpus", "num_workers", "devices")
    },
    **{f"async.{item.name}": item.name for item in fields(AsyncConfig)},
}

FASTVIDEO_SAMPLING = ("num_steps", "scheduler", "trajectory", "flow_shift", "timesteps", "sigmas")
FASTVIDEO_METHOD = (
    "timestep_fraction", "decay_type", "adv_mode", "adv_clip_max", "num_video_per_prompt", "num_inner_epochs",
    "kl_beta", "max_grad_norm",
)  # fmt: skip

# The same for one schema only, by its class: the systems that a kind of run comes from mean something else by the name.
ALIASES_OF: dict[str, dict[str, str]] = {
    "DiffusionRunConfig": {
        "num_train_epochs": "max_epochs",  # ROLL: optimisation rounds per batch of samples
        "trainer.total_epochs": "max_steps",  # VRL: an epoch is a rollout and its updates
        "model_paths": "pretrain",  # ROLL: a JSON file that names a model's parts
        "num_video_per_prompt": "n_samples_per_prompt",  # FastVideo
        "num_inner_epochs": "max_epochs",  # FastVideo and Flow-GRPO
        "kl_beta": "nft_kl_beta",
        **{f"method.sampling.{name}": name for name in FASTVIDEO_SAMPLING},
        **{f"method.{name}": name for name in FASTVIDEO_METHOD},
        "method.beta": "nft_beta",
        "method.ema.enabled": "enable_ema",
        "method.ema.decay": "ema_beta",
        "method.ema.validation": "eval_ema",
        "method.validation.every_steps": "eval_steps",
        "method.validation.num_steps": "eval_num_steps",
        "method.validation.num_prompts": "max_eval_samples",
        "method.validation.seed": "eval_seed",
        "method.validation.data_path": "eval_data",
        "algorithm.init_kl_coef": "beta",  # VRL
    },
}

# Settings that say the same thing in several ways: the one that is written last counts, the others are unset.
ONE_OF_THESE = (("train.train_batch_size", "train.groups_per_update", "train.gradient_accumulation_steps"),)

# Settings whose default is by another one, by that one.
FOLLOWING = {"train.enable_ema": "output.eval_ema"}

# Words for "unset" besides null, by setting: of FastVideo and LightRFT.
UNSET_WORDS: dict[str, tuple[str, ...]] = {"flow_shift": ("inherit",), "reward_pretrain": ("{}",)}

# Settings that may stand alone on the command line without being a bool, and the value they then take.
BARE_VALUES: dict[str, str] = {"freeze_prefix": "true", "gradient_checkpointing": FULL}

# Text settings that hold a comma-separated list: several words, a JSON list and a YAML list mean the same.
COMMA_LISTS = (
    "prompt_data", "prompt_data_probs", "eval_data", "target_modules", "target_parameters", "trainable_models",
    "freeze_prefix", "remote_rm_url", "reward_pretrain", "reward_fn", "gold_fn", "tools", "plugins",
)  # fmt: skip

# Settings that name files or folders, in which a leading ~ is the home folder; the others of COMMA_LISTS name modules.
PATHS = (
    "pretrain", "critic_pretrain", "teacher_pretrain", "prompt_data", "eval_data", "image_root", "reward_fn",
    "reward_pretrain", "remote_rm_url", "reward_recipe", "differentiable_reward", "output_dir", "save_path",
    "ckpt_path", "resume_from", "plugins", "tokenizer_path", "gold_fn", "gold_recipe", "pair_data",
)  # fmt: skip

# What to say where one of these is given a value that is neither yes nor no, as it takes elsewhere. It may be a key, so
# no message repeats it.
SWITCHES: dict[str, str] = {
    "use_wandb": "the key comes from the environment variable WANDB_API_KEY or from `wandb login`, never from a "
    "setting; WANDB_PROJECT names the project",
    "load_checkpoint": "a folder, or auto, is --resume_from",
    "use_tensorboard": "its files go to the folder tensorboard of output_dir",
}

# name -> what to write instead. Of several texts the first is given whose --flags the schema at hand has; a text
# without any suits every schema, and a flag behind the word deepspeed is the launcher's.
DIFFERENT: dict[str, str | tuple[str, ...]] = {
    "init_kl_coef": "the weight of the KL is --beta",
    "clip_range": "write --eps_clip",
    "eps_clip": "write --clip_range",
    "lr_scheduler": "write --lr_scheduler_type",
    "warmup_steps": "write --lr_warmup_ratio (a share of all steps)",
    "lr_warmup_steps": "write --lr_warmup_ratio (a share of all steps)",
    "warmup_ratio": "write --warmup_steps (optimizer steps)",
    "lr_warmup_ratio": "write --warmup_steps (optimizer steps)",
    "actor_learning_rate": "write --learning_rate",
}


@dataclass(frozen=True)
class Spoken:
    """What users type, in four tables. aliases_of and translations are by the class of the schema."""

    aliases: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    aliases_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    different: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    translations: Mapping[str, Mapping[str, Translation]] = field(default_factory=dict)


OWN = Spoken(ALIASES, ALIASES_OF, DIFFERENT, TRANSLATIONS)
