"""Names that users of other systems type, and the names they reach here.

An alias is listed only where it means exactly the same. A name whose meaning differs, or that takes other values, is
listed in ``DIFFERENT`` with what to write instead, so that it is refused with advice and never quietly reinterpreted.
"""

from __future__ import annotations

# alias -> leaf name, or several leaf names that share the values given. An alias may lead to another alias: the first
# name on the way that the schema has is the one that is set. Aliases whose leaf a schema lacks do not exist there.
ALIASES: dict[str, str | tuple[str, ...]] = {
    # TRL
    "model_name_or_path": "pretrain",
    "pretrained_model_name_or_path": "pretrain",
    "lr": "learning_rate",
    "learning_rate": "actor_learning_rate",
    "num_generations": "n_samples_per_prompt",
    "max_prompt_length": "prompt_max_len",
    "max_completion_length": "generate_max_len",
    "max_new_tokens": "generate_max_len",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "num_iterations": "max_epochs",
    "num_ppo_epochs": "max_epochs",
    "num_train_epochs": "num_episodes",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_ratio": "lr_warmup_ratio",
    "lr_warmup_steps": "warmup_steps",
    "weight_decay": "l2",
    "max_grad_norm": "max_norm",
    "save_total_limit": "max_ckpt_num",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "vllm_gpu_memory_utilization": "engine_mem_util",
    "vllm_tensor_parallel_size": "engine_tp_size",
    # OpenRLHF and LightRFT
    "loss": "policy_loss",
    "policy_loss_type": "policy_loss",
    "eps_clip_low_high": ("eps_clip", "eps_clip_high"),
    "entropy_loss_coef": "entropy_coef",
    "vllm_mem_util": "engine_mem_util",
    "vllm_enable_sleep": "enable_engine_sleep",
    "save_dir": "output_dir",
    # verl, ROLL and Flow-GRPO
    "clip_ratio": "eps_clip",
    "clip_ratio_low": "eps_clip",
    "clip_ratio_high": "eps_clip_high",
    "ppo_epochs": "max_epochs",
    "num_return_sequences_in_group": "n_samples_per_prompt",
    "num_image_per_prompt": "n_samples_per_prompt",
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
    "RunConfig": {
        # verl
        "actor_rollout_ref.model.path": "pretrain",
        "actor_rollout_ref.model.lora_rank": "lora_rank",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
        "actor_rollout_ref.actor.optim.lr": "actor_learning_rate",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "groups_per_update",  # prompts there, not samples
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "micro_train_batch_size",
        "actor_rollout_ref.actor.ppo_epochs": "max_epochs",
        "actor_rollout_ref.actor.clip_ratio": "eps_clip",
        "actor_rollout_ref.actor.clip_ratio_low": "eps_clip",
        "actor_rollout_ref.actor.clip_ratio_high": "eps_clip_high",
        "actor_rollout_ref.actor.clip_ratio_c": "dual_clip",
        "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
        "actor_rollout_ref.actor.grad_clip": "max_norm",
        "actor_rollout_ref.actor.loss_agg_mode": "loss_agg_mode",
        "actor_rollout_ref.actor.use_kl_loss": "use_kl_loss",
        "actor_rollout_ref.actor.kl_loss_coef": "init_kl_coef",
        "actor_rollout_ref.rollout.name": "engine_type",
        "actor_rollout_ref.rollout.n": "n_samples_per_prompt",
        "actor_rollout_ref.rollout.temperature": "temperature",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine_tp_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "engine_mem_util",
        "critic.optim.lr": "critic_learning_rate",
        "critic.cliprange_value": "value_clip",
        "algorithm.lam": "lambd",
        "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
        "data.train_files": "prompt_data",
        "data.val_files": "eval_data",
        "data.train_batch_size": "rollout_batch_size",  # prompts of a rollout there
        "data.prompt_key": "input_key",
        "data.max_prompt_length": "prompt_max_len",
        "data.max_response_length": "generate_max_len",
        "trainer.total_epochs": "num_episodes",
        "trainer.total_training_steps": "max_steps",
        "trainer.test_freq": "eval_steps",
        "trainer.experiment_name": "run_name",
        "trainer.default_local_dir": "output_dir",
        # EasyR1
        "data.rollout_batch_size": "rollout_batch_size",
        "data.answer_key": "reference_key",
        "data.image_key": "images_key",
        "worker.actor.model.model_path": "pretrain",
        "worker.actor.optim.lr": "actor_learning_rate",
        "worker.actor.global_batch_size": "groups_per_update",  # prompts there
        "worker.actor.micro_batch_size_per_device_for_update": "micro_train_batch_size",
        "worker.rollout.n": "n_samples_per_prompt",
        "worker.rollout.tensor_parallel_size": "engine_tp_size",
        "algorithm.kl_coef": "init_kl_coef",
        "trainer.save_limit": "max_ckpt_num",
        "trainer.save_checkpoint_path": "output_dir",
    },
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
        "sample.num_steps": "num_steps",  # Flow-GRPO
        "sample.eval_num_steps": "eval_num_steps",
        "sample.guidance_scale": "guidance_scale",
        "sample.noise_level": "noise_level",
        "sample.num_image_per_prompt": "n_samples_per_prompt",
        "sample.global_std": "global_std",
        "sample.same_latent": "same_latent",
        "sample.sde_window_size": "sde_window_size",
        "sample.sde_window_range": "sde_window_range",
        "train.num_inner_epochs": "max_epochs",
        "train.timestep_fraction": "timestep_fraction",
        "train.clip_range": "clip_range",
        "train.adv_clip_max": "adv_clip_max",
        "train.beta": "beta",
        "train.cfg": "cfg_in_training",
        "train.ema": "enable_ema",
        "train.learning_rate": "learning_rate",
        "algorithm.init_kl_coef": "beta",  # VRL
    },
}

# Settings that say the same thing in several ways: the one that is written last counts, the others are unset.
ONE_OF_THESE = (("train.train_batch_size", "train.groups_per_update", "train.gradient_accumulation_steps"),)

# Words for "unset" besides null, by setting.
UNSET_WORDS: dict[str, tuple[str, ...]] = {"flow_shift": ("inherit",)}  # FastVideo

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
    # algorithm
    "beta": "TRL's beta weighs a KL term in the loss: write --init_kl_coef X --use_kl_loss --kl_estimator k3; "
    "for a beta of 0 --init_kl_coef 0 alone",
    "kl_loss_coef": (
        "it weighs a KL term in the loss: write --init_kl_coef X --use_kl_loss --kl_estimator k3; "
        "for 0 --init_kl_coef 0 alone",
        "the weight of the KL is --beta",
    ),
    "kl_coef": ("the weight of the KL is --init_kl_coef", "the weight of the KL is --beta"),
    "init_kl_coef": "the weight of the KL is --beta",
    "loss_type": "TRL's loss_type says how the loss is averaged: for grpo write --loss_agg_mode seq-mean-token-mean, "
    "for bnpo and dapo --loss_agg_mode token-mean, for dr_grpo --loss_agg_mode seq-mean-token-sum-norm "
    "--advantage_estimator dr_grpo; the loss of a token is --policy_loss",
    "scale_rewards": "write --advantage_estimator group_norm (divided by the group's spread) or dr_grpo (not divided)",
    "clip_range": "write --eps_clip",
    "cliprange": ("write --eps_clip", "write --clip_range"),
    "eps_clip": "write --clip_range",
    "clip_ratio": "write --clip_range",
    # batches and epochs
    "num_epochs": "passes over the prompts are --num_episodes, rollout steps --max_steps, passes over each rollout's "
    "samples --max_epochs",
    "max_train_steps": "rollout steps are --max_steps",
    "num_samples": "samples of one prompt are --n_samples_per_prompt, rows taken of each data set --max_samples",
    "max_len": "lengths are --prompt_max_len and --generate_max_len",
    # optimizer
    "lr_scheduler": "write --lr_scheduler_type",
    "warmup_steps": "write --lr_warmup_ratio (a share of all steps)",
    "lr_warmup_steps": "write --lr_warmup_ratio (a share of all steps)",
    "warmup_ratio": "write --warmup_steps (optimizer steps)",
    "lr_warmup_ratio": "write --warmup_steps (optimizer steps)",
    "actor_learning_rate": "write --learning_rate",
    **dict.fromkeys(("betas", "adam_beta1", "adam_beta2"), "write --adam_betas 0.9 0.95"),
    # data and rewards
    **dict.fromkeys(
        ("dataset", "dataset_name", "dataset_path", "train_data", "train_file", "train_dataset"),
        "write --prompt_data PATH, a file or a saved data set folder; hub names are not fetched",
    ),
    **dict.fromkeys(
        ("reward_model", "reward_funcs"),
        "write --reward_pretrain FOLDER for a reward model, --reward_fn path.py:function or --remote_rm_url URL",
    ),
    # model
    **dict.fromkeys(("model_path", "model_name"), "write --pretrain"),
    **dict.fromkeys(("use_peft", "use_lora"), "write --lora_rank R; 0 turns LoRA off"),
    **dict.fromkeys(("mixed_precision", "fp16", "torch_dtype"), "write --bf16; without it everything is float32"),
    **dict.fromkeys(("flash_attn", "use_flash_attn"), "write --attn_implementation flash_attention_2"),
    "resolution": "write --height and --width (pixels)",
    # engine and processes
    "use_vllm": (
        "leave it out: --engine_type vllm is the default, sglang and hf are the other choices",
        "leave it out: pictures are drawn by diffusers",
    ),
    **dict.fromkeys(
        ("colocate_all_models", "colocate_actor_ref"),
        "leave it out: every rank trains, holds the reference and generates",
    ),
    **{
        f"{role}_num_{unit}": "processes are not placed by role: every rank has every role, and deepspeed --num_gpus N "
        "script.py says how many there are"
        for role in ("actor", "ref", "critic", "reward")
        for unit in ("nodes", "gpus_per_node")
    },
    "vllm_num_engines": "leave it out: every rank takes part in an engine, of --engine_tp_size ranks",
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config", "ds_config"),
        "leave it out: DeepSpeed is always used and configured from the settings, such as --zero_stage",
    ),
    **{
        name: f"it belongs to the launcher and goes before the script: deepspeed --{name} VALUE script.py"
        for name in ("num_gpus", "num_nodes", "master_port", "master_addr", "hostfile", "include", "exclude")
    },
    **dict.fromkeys(
        ("num_processes", "nproc_per_node"),
        "it belongs to the launcher and goes before the script: deepspeed --num_gpus N script.py",
    ),
    # output
    **dict.fromkeys(("report_to", "log_with"), "write --use_wandb or --use_tensorboard"),
    **{
        f"wandb_{name}": f"write --use_wandb and set the environment variable WANDB_{name.upper()}"
        for name in ("project", "entity")
    },
    "wandb_run_name": "write --run_name",
    **dict.fromkeys(
        ("wandb_key", "wandb_api_key", "wandb_token"),
        "write --use_wandb and put the key into the environment variable WANDB_API_KEY, or run `wandb login`",
    ),
    **dict.fromkeys(
        ("logging_dir", "log_dir", "tensorboard_dir"),
        "write --use_tensorboard; its files lie in the folder tensorboard of --output_dir",
    ),
    "resume_from_checkpoint": "write --resume_from FOLDER, or --resume_from auto for the newest checkpoint",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "write --eval_steps N"),
    "save_strategy": "write --save_steps N",
}
