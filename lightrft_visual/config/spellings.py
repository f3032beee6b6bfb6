"""Names beside those of the schema, and the settings they reach: LightRFT's, and those of the commands and files that a
run is started with. Those of other systems are a plug-in's, in the same form (`Spoken`).

An alias is listed only where it means exactly the same. A name whose meaning differs, or that takes other values, is
listed in ``DIFFERENT`` with what to write instead, so that it is refused with advice and never quietly reinterpreted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .translations import TRANSLATIONS, Translation

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
    "policy_loss_type": "policy_loss",
    "eps_clip_low_high": ("eps_clip", "eps_clip_high"),
    "entropy_loss_coef": "entropy_coef",
    "vllm_mem_util": "engine_mem_util",
    "vllm_enable_sleep": "enable_engine_sleep",
    "save_dir": "output_dir",
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
    "distributed.resources.trainer.num_gpus": "trainer_num_gpus",
    "distributed.resources.trainer.devices": "trainer_devices",
    "distributed.resources.rollout.num_gpus": "rollout_num_gpus",
    "distributed.resources.rollout.num_workers": "rollout_num_workers",
    "distributed.resources.rollout.devices": "rollout_devices",
    "distributed.resources.reward.num_gpus": "reward_num_gpus",
    "distributed.resources.reward.num_workers": "reward_num_workers",
    "distributed.resources.reward.devices": "reward_devices",
    "async.max_staleness": "max_staleness",
    "async.batches_ahead": "batches_ahead",
    "async.stale_correction": "stale_correction",
    "async.partial_rollouts": "partial_rollouts",
    "async.partial_tokens": "partial_tokens",
}

# The same for one schema only, by its class: the systems that a kind of run comes from mean something else by the name.
ALIASES_OF: dict[str, dict[str, str]] = {
    "DiffusionRunConfig": {
        "num_train_epochs": "max_epochs",  # ROLL: optimisation rounds per batch of samples
        "trainer.total_epochs": "max_steps",  # VRL: an epoch is a rollout and its updates
        "model_paths": "pretrain",  # ROLL: a JSON file that names a model's parts
        "num_video_per_prompt": "n_samples_per_prompt",  # FastVideo
        "num_inner_epochs": "max_epochs",  # FastVideo and Flow-GRPO
        "kl_beta": "nft_kl_beta",
        **{
            f"method.sampling.{name}": name
            for name in ("num_steps", "scheduler", "trajectory", "flow_shift", "timesteps", "sigmas")
        },
        **{
            f"method.{name}": name
            for name in (
                "timestep_fraction",
                "decay_type",
                "adv_mode",
                "adv_clip_max",
                "num_video_per_prompt",
                "num_inner_epochs",
                "kl_beta",
                "max_grad_norm",
            )
        },
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

# Words for "unset" besides null, by setting.
UNSET_WORDS: dict[str, tuple[str, ...]] = {
    "flow_shift": ("inherit",),
    "reward_pretrain": ("{}",),
}  # FastVideo, LightRFT

# Settings that may stand alone on the command line without being a bool, and the value they then take.
BARE_VALUES: dict[str, str] = {"freeze_prefix": "true"}

# Text settings that hold a comma-separated list: several words, a JSON list and a YAML list mean the same.
COMMA_LISTS = (
    "prompt_data", "prompt_data_probs", "eval_data", "target_modules", "trainable_models", "freeze_prefix",
    "remote_rm_url", "reward_pretrain", "plugins",
)  # fmt: skip

# Settings that name files or folders, in which a leading ~ is the home folder; the others of COMMA_LISTS name modules.
PATHS = (
    "pretrain", "critic_pretrain", "teacher_pretrain", "prompt_data", "eval_data", "image_root", "reward_fn",
    "reward_pretrain", "remote_rm_url", "reward_recipe", "differentiable_reward", "output_dir", "save_path",
    "ckpt_path", "resume_from", "plugins", "tokenizer_path", "gold_fn", "gold_recipe", "pair_data",
    "reward_weights_file",
)  # fmt: skip

# What to say where one of these is given a value that is neither yes nor no, as it takes elsewhere. It may be a key, so
# no message repeats it.
SWITCHES: dict[str, str] = {
    "use_wandb": "the key comes from the environment variable WANDB_API_KEY or from `wandb login`, never from a "
    "setting; WANDB_PROJECT names the project",
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
    """What users type: the four tables of this module and of translations.py. aliases_of and translations are by the
    class of the schema."""

    aliases: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    aliases_of: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    different: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    translations: Mapping[str, Mapping[str, Translation]] = field(default_factory=dict)


OWN = Spoken(ALIASES, ALIASES_OF, DIFFERENT, TRANSLATIONS)
