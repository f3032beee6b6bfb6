"""Settings of LightRFT, TRL, verl, EasyR1, OpenRLHF and Flow-GRPO: under their names, or as advice what to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ...config.spellings import Spoken, Translation, by_word
from ...errors import ConfigError

ALIASES: dict[str, str | tuple[str, ...]] = {
    "model_name_or_path": "pretrain",
    "pretrained_model_name_or_path": "pretrain",
    "num_generations": "n_samples_per_prompt",
    "max_prompt_length": "prompt_max_len",
    "max_completion_length": "generate_max_len",
    "max_new_tokens": "generate_max_len",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "num_iterations": "max_epochs",
    "num_ppo_epochs": "max_epochs",
    "save_total_limit": "max_ckpt_num",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "vllm_gpu_memory_utilization": "engine_mem_util",
    "vllm_tensor_parallel_size": "engine_tp_size",
    "clip_ratio": "eps_clip",
    "clip_ratio_low": "eps_clip",
    "clip_ratio_high": "eps_clip_high",
    "ppo_epochs": "max_epochs",
    "num_return_sequences_in_group": "n_samples_per_prompt",
    "num_image_per_prompt": "n_samples_per_prompt",
    "enable_liger_kernel": "use_liger_kernel",  # LLaMA-Factory
    "mask_truncated_completions": "mask_truncated",
    "gpu_memory_utilization": "engine_mem_util",
    "max_num_batched_tokens": "engine_max_num_batched_tokens",
    "max_num_seqs": "engine_max_num_seqs",
    "enforce_eager": "engine_enforce_eager",
    "image_max_pixels": "max_pixels",
    "image_min_pixels": "min_pixels",
    "eval_n_samples_per_prompt": "eval_samples_per_prompt",  # OpenRLHF
    "train_max_tokens_per_gpu": "max_tokens_per_batch",
    "overlong_penalty_factor": "overlong_buffer_penalty_factor",
}

ALIASES_OF: dict[str, dict[str, str]] = {
    "RunConfig": {
        # verl
        "actor_rollout_ref.model.path": "pretrain",
        "actor_rollout_ref.model.lora_rank": "lora_rank",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
        "actor_rollout_ref.model.use_liger": "use_liger_kernel",
        "actor_rollout_ref.model.lora_alpha": "lora_alpha",
        "actor_rollout_ref.model.target_modules": "target_modules",
        "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
        "actor_rollout_ref.model.use_remove_padding": "packing_samples",
        "actor_rollout_ref.actor.optim.lr": "actor_learning_rate",
        "actor_rollout_ref.actor.optim.weight_decay": "l2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "lr_warmup_ratio",
        "actor_rollout_ref.actor.optim.betas": "adam_betas",
        "actor_rollout_ref.actor.optim.clip_grad": "max_norm",
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "lr_scheduler",
        "actor_rollout_ref.actor.optim.warmup_style": "lr_scheduler",
        "actor_rollout_ref.actor.tau_pos": "sapo_tau_pos",
        "actor_rollout_ref.actor.tau_neg": "sapo_tau_neg",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": "cov_share",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb": "clip_cov_low",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub": "clip_cov_high",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "max_tokens_per_batch",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "sp_size",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "adam_offload",
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
        "actor_rollout_ref.rollout.val_kwargs.n": "eval_samples_per_prompt",
        "actor_rollout_ref.rollout.top_p": "top_p",
        "actor_rollout_ref.rollout.top_k": "top_k",
        "actor_rollout_ref.rollout.enforce_eager": "engine_enforce_eager",
        "actor_rollout_ref.rollout.free_cache_engine": "enable_engine_sleep",
        "actor_rollout_ref.rollout.max_num_seqs": "engine_max_num_seqs",
        "actor_rollout_ref.rollout.max_num_batched_tokens": "engine_max_num_batched_tokens",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "micro_rollout_batch_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine_tp_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "engine_mem_util",
        "critic.optim.lr": "critic_learning_rate",
        "critic.cliprange_value": "value_clip",
        "critic.model.path": "critic_pretrain",
        "algorithm.lam": "lambd",
        "algorithm.filter_groups.enable": "dynamic_sampling",
        "algorithm.filter_groups.max_num_gen_batches": "dynamic_sampling_max_tries",
        "reward_model.model.path": "reward_pretrain",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len": "overlong_buffer_len",
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "overlong_buffer_penalty_factor",
        "reward_model.overlong_buffer.enable": "overlong_buffer",
        "reward_model.overlong_buffer.len": "overlong_buffer_len",
        "reward_model.overlong_buffer.penalty_factor": "overlong_buffer_penalty_factor",
        "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
        "data.train_files": "prompt_data",
        "data.val_files": "eval_data",
        "data.train_batch_size": "rollout_batch_size",  # prompts of a rollout there
        "data.prompt_key": "input_key",
        "data.max_prompt_length": "prompt_max_len",
        "data.max_response_length": "generate_max_len",
        "data.train_max_samples": "max_samples",
        "data.val_max_samples": "max_eval_samples",
        "trainer.total_epochs": "num_episodes",
        "trainer.total_training_steps": "max_steps",
        "trainer.test_freq": "eval_steps",
        "trainer.critic_warmup": "freezing_actor_steps",
        "trainer.max_actor_ckpt_to_keep": "max_ckpt_num",
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
        "worker.actor.micro_batch_size_per_device_for_experience": "micro_rollout_batch_size",
        "worker.actor.max_grad_norm": "max_norm",
        "worker.actor.ppo_epochs": "max_epochs",
        "worker.actor.tau_positive": "sapo_tau_pos",
        "worker.actor.tau_negative": "sapo_tau_neg",
        "worker.actor.padding_free": "packing_samples",
        "worker.actor.ulysses_size": "sp_size",
        "worker.actor.ulysses_sequence_parallel_size": "sp_size",
        "worker.actor.clip_ratio_low": "eps_clip",
        "worker.actor.clip_ratio_high": "eps_clip_high",
        "worker.actor.clip_ratio_dual": "dual_clip",
        "worker.actor.model.enable_gradient_checkpointing": "gradient_checkpointing",
        "worker.actor.model.trust_remote_code": "trust_remote_code",
        "worker.actor.optim.weight_decay": "l2",
        "worker.actor.optim.betas": "adam_betas",
        "worker.actor.optim.lr_scheduler_type": "lr_scheduler",
        "worker.actor.model.lora.rank": "lora_rank",
        "worker.actor.model.lora.alpha": "lora_alpha",
        "worker.actor.model.lora.target_modules": "target_modules",
        "worker.critic.optim.lr": "critic_learning_rate",
        "worker.critic.cliprange_value": "value_clip",
        "worker.critic.model.model_path": "critic_pretrain",
        "worker.actor.optim.lr_warmup_ratio": "lr_warmup_ratio",
        "worker.actor.offload.offload_optimizer": "adam_offload",
        "worker.rollout.n": "n_samples_per_prompt",
        "worker.rollout.temperature": "temperature",
        "worker.rollout.top_p": "top_p",
        "worker.rollout.top_k": "top_k",
        "worker.rollout.max_num_batched_tokens": "engine_max_num_batched_tokens",
        "worker.rollout.val_override_config.n": "eval_samples_per_prompt",
        "worker.rollout.gpu_memory_utilization": "engine_mem_util",
        "worker.rollout.enforce_eager": "engine_enforce_eager",
        "worker.rollout.tensor_parallel_size": "engine_tp_size",
        "worker.reward.reward_function": "reward_fn",
        "algorithm.kl_coef": "init_kl_coef",
        "algorithm.online_filtering": "dynamic_sampling",
        "trainer.max_try_make_batch": "dynamic_sampling_max_tries",
        "data.video_key": "videos_key",
        "data.image_dir": "image_root",
        "trainer.max_steps": "max_steps",
        "trainer.val_freq": "eval_steps",
        "trainer.load_checkpoint_path": "resume_from",
        "trainer.save_limit": "max_ckpt_num",
        "trainer.save_checkpoint_path": "output_dir",
        # OpenRLHF
        "actor.model_name_or_path": "pretrain",
        "critic.model_name_or_path": "critic_pretrain",
        "reward.model_name_or_path": "reward_pretrain",
        "reward.remote_url": "remote_rm_url",
        "reward.normalize_enable": "reward_running_norm",
        "reward.overlong_buffer_len": "overlong_buffer_len",
        "reward.overlong_penalty_factor": "overlong_buffer_penalty_factor",
        "actor.eps_clip_low_high": "eps_clip_low_high",
        "ckpt.load_enable": "load_checkpoint",
        "ckpt.best_metric_key": "best_metric",
        "rollout.max_new_tokens": "generate_max_len",
        "data.prompt_dataset": "prompt_data",
        "data.prompt_probs": "prompt_data_probs",
        "data.max_images_per_prompt": "limit_mm_image_per_prompt",
        "eval.dataset": "eval_data",
        "eval.split": "eval_split",
        "eval.steps": "eval_steps",
        "eval.n_samples_per_prompt": "eval_samples_per_prompt",
        "ckpt.save_steps": "save_steps",
        "ckpt.path": "ckpt_path",
        "ckpt.max_num": "max_ckpt_num",
        "ckpt.output_dir": "output_dir",
        "ds.zero_stage": "zero_stage",
        "ds.zpg": "zpg",
        "ds.adam_offload": "adam_offload",
        "ds.attn_implementation": "attn_implementation",
        "ds.use_liger_kernel": "use_liger_kernel",
        "ds.grad_accum_dtype": "grad_accum_dtype",
        "ds.overlap_comm": "overlap_comm",
        "ds.packing_samples": "packing_samples",
        "ds.lora.rank": "lora_rank",
        "ds.lora.alpha": "lora_alpha",
        "ds.lora.dropout": "lora_dropout",
        "ds.lora.target_modules": "target_modules",
        "actor.gradient_checkpointing_enable": "gradient_checkpointing",
        "actor.eps_clip": "eps_clip",
        "actor.dual_clip": "dual_clip",
        "actor.entropy_coef": "entropy_coef",
        "actor.policy_loss_type": "policy_loss",
        "critic.value_clip": "value_clip",
        "critic.freezing_steps": "freezing_actor_steps",
        "vllm.tensor_parallel_size": "engine_tp_size",
        "vllm.enforce_eager": "engine_enforce_eager",
        "vllm.enable_sleep": "enable_engine_sleep",
        "vllm.gpu_memory_utilization": "engine_mem_util",
        "rollout.batch_size": "rollout_batch_size",
        "rollout.micro_batch_size": "micro_rollout_batch_size",
        "train.batch_size": "train_batch_size",
        "train.micro_batch_size": "micro_train_batch_size",
        "train.max_tokens_per_gpu": "max_tokens_per_batch",
        "algo.advantage.estimator": "advantage_estimator",
        "algo.advantage.gamma": "gamma",
        "algo.advantage.lambd": "lambd",
        "algo.kl.target": "kl_target",
        "algo.kl.horizon": "kl_horizon",
        "algo.kl.init_coef": "init_kl_coef",
        "algo.kl.estimator": "kl_estimator",
        "algo.kl.use_loss": "use_kl_loss",
        "algo.dynamic_filtering_enable": "dynamic_sampling",
        "logger.logging_steps": "logging_steps",
        "logger.wandb.run_name": "run_name",
        "actor.adam.lr": "actor_learning_rate",
        "actor.adam.betas": "adam_betas",
        "actor.adam.weight_decay": "l2",
        "actor.lr_warmup_ratio": "lr_warmup_ratio",
        "actor.max_norm": "max_norm",
        "critic.adam.lr": "critic_learning_rate",
    },
}
ALIASES_OF["SFTRunConfig"] = {
    **{name: own for name, own in ALIASES_OF["RunConfig"].items() if name.split(".")[0] in ("ckpt", "ds", "eval")},
    # verl
    "model.path": "pretrain",
    "model.partial_pretrain": "pretrain",
    "model.enable_gradient_checkpointing": "gradient_checkpointing",
    "model.use_remove_padding": "packing_samples",
    "model.use_liger": "use_liger_kernel",
    "data.train_files": "prompt_data",
    "data.val_files": "eval_data",
    "data.train_batch_size": "train_batch_size",
    "data.micro_batch_size_per_gpu": "micro_train_batch_size",
    "data.max_token_len_per_gpu": "max_tokens_per_batch",
    "data.prompt_key": "input_key",
    "optim.lr": "actor_learning_rate",
    "optim.betas": "adam_betas",
    "optim.weight_decay": "l2",
    "optim.clip_grad": "max_norm",
    "optim.lr_warmup_steps_ratio": "lr_warmup_ratio",
    "optim.lr_scheduler_type": "lr_scheduler",
    "trainer.total_epochs": "num_episodes",
    "trainer.total_training_steps": "max_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.default_local_dir": "output_dir",
    "trainer.experiment_name": "run_name",
    "trainer.max_ckpt_to_keep": "max_ckpt_num",
    # OpenRLHF
    "data.dataset": "prompt_data",
    "data.output_key": "response_key",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.max_epochs": "num_episodes",
    "adam.lr": "actor_learning_rate",
    "adam.betas": "adam_betas",
    "adam.weight_decay": "l2",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "logger.logging_steps": "logging_steps",
    "logger.wandb.run_name": "run_name",
}
ALIASES_OF["DiffusionRunConfig"] = {  # Flow-GRPO
    "sample.num_steps": "num_steps",
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
    "train.adam_weight_decay": "l2",
    "pretrained.model": "pretrain",
    "save_freq": "save_steps",  # epochs there, each of which is a rollout and its updates
    "eval_freq": "eval_steps",
}

# As in config/spellings.py.
_ALWAYS = "leave it out: "
# Flags of LightRFT's scripts that have other names here, or no need of one.
LIGHTRFT: dict[str, str | tuple[str, ...]] = {
    "use_gspo": "write --policy_loss gspo",
    "use_cpg_loss": "write --policy_loss cpgd",
    "normalize_advantages": "leave it out: --policy_loss gspo takes the advantages of --advantage_estimator; "
    "--advantages_norm whitens them",
    "use_sequence_rewards": _ALWAYS + "rewards are of sequences, and --policy_loss gspo has their ratio",
    "normalize_reward_for_critic": "write --reward_running_norm",
    "mark_high_entropy_tokens": "leave it out: --high_entropy_token_ratio 0.2 trains on that share of the tokens",
    "disable_engine_sleep": "write --enable_engine_sleep false",
    "fsdp": "write --zero_stage 3; models are divided by DeepSpeed",
    "fsdp_cpu_offload": "write --adam_offload; models are divided by DeepSpeed",
    "use_mp_opt": "leave it out: under --bf16 DeepSpeed's optimizer holds its weights in float32",
    "initial_model_shard_size": "leave it out: the reference is divided as --zero_stage says",
    "mixed_mm_data": _ALWAYS + "batches of texts, images and videos may mix on any rank",
    "text_only": _ALWAYS + "a model without a vision tower, and rows without media, are seen as such",
    "no_shard_vit": _ALWAYS + "the vision tower is divided with the model",
    "fused_linear_logprob": _ALWAYS + "log-probs are always computed without holding all logits",
    "chunk_size": _ALWAYS + "log-probs are always computed without holding all logits",
    "disable_logprobs_flashattn": _ALWAYS + "log-probs need no kernel of flash-attn",
    "gradient_checkpointing_use_reentrant": "write --gradient_checkpointing; it never is reentrant",
    **dict.fromkeys(("meta_init", "actor_init_on_gpu"), _ALWAYS + "models are loaded where they will be"),
    "disable_fast_tokenizer": _ALWAYS + "the tokenizer is the one that the model's folder names",
    "load_in_4bit": "weights of 4 bits do not hold base and adapters as one, as engines take them; write --lora_rank R",
    "aux_loss_coef": "the loss for the balance of experts is --router_aux_loss_coef; 0 turns it off",
    **dict.fromkeys(
        ("pretrain_data", "pretrain_data_probs", "pretrain_split", "ptx_coef"),
        "there is no loss on pretraining data beside the policy's: leave it out",
    ),
    "rm_use_engine": _ALWAYS + "a judge that an engine serves is asked by URL, --remote_rm_url",
    "rm_engine_cudagraph": _ALWAYS + "a judge that an engine serves is asked by URL, --remote_rm_url",
    "value_head_prefix": _ALWAYS + "the head of --critic_pretrain is found by its shape",
    "save_value_network": _ALWAYS + "checkpoints hold the critic",
    "save_hf_ckpt": _ALWAYS + "checkpoint-final holds the model in the form of transformers",
    "disable_ds_ckpt": "write --save_steps -1, which saves at the end alone",
    "ckpt_path_local": "write --ckpt_path",
    "max_ckpt_mem": "write --max_ckpt_num, the number of checkpoints that are kept",
    "print_replay_buffer_stats": _ALWAYS + "metrics.csv and report.html have the statistics of each step",
    **dict.fromkeys(
        ("trajectory_analysis", "plot_every"), "leave it out: report.html shows lengths, and --save_trajectories texts"
    ),
    "wandb_group": "write --use_wandb and set the environment variable WANDB_RUN_GROUP",
    "wandb_org": "write --use_wandb and set the environment variable WANDB_ENTITY",
    "input_template": "write --apply_chat_template, and --system_prompt for what stands before the question",
    "system_prompt_path": 'write --system_prompt "$(cat FILE)"',
    "fps": 'it is said in the row, as {"video": PATH, "fps": 2}',
    "audio_dir": "there is no audio here",
    "use_ms": "models of ModelScope are downloaded first, and named by --pretrain FOLDER",
    **dict.fromkeys(
        ("nnodes", "node_rank"), "it belongs to the launcher and goes before the script: deepspeed --hostfile FILE"
    ),
}

DIFFERENT: dict[str, str | tuple[str, ...]] = {
    "normalize_reward": "leave it out: OpenRLHF takes mean and deviation from the reward model's file; "
    "--reward_running_norm those of this run's rewards",
    "beta": "TRL's beta weighs a KL term in the loss: write --init_kl_coef X --use_kl_loss --kl_estimator k3; "
    "for a beta of 0 --init_kl_coef 0 alone",
    "kl_loss_coef": (
        "it weighs a KL term in the loss: write --init_kl_coef X --use_kl_loss --kl_estimator k3; "
        "for 0 --init_kl_coef 0 alone",
        "the weight of the KL is --beta",
    ),
    "kl_coef": ("the weight of the KL is --init_kl_coef", "the weight of the KL is --beta"),
    "loss_type": "TRL's loss_type says how the loss is averaged: for grpo write --loss_agg_mode seq-mean-token-mean, "
    "for bnpo and dapo --loss_agg_mode token-mean, for dr_grpo --loss_agg_mode seq-mean-token-sum-norm "
    "--advantage_estimator dr_grpo; the loss of a token is --policy_loss",
    "scale_rewards": "write --advantage_estimator group_norm (divided by the group's spread) or dr_grpo (not divided)",
    "use_liger_loss": _ALWAYS + "log-probs are always computed without holding all logits",
    "cliprange": ("write --eps_clip", "write --clip_range"),
    "clip_ratio": "write --clip_range",
    **dict.fromkeys(
        ("num_epochs", "epochs"),
        "passes over the prompts are --num_episodes, rollout steps --max_steps, passes over each rollout's samples "
        "--max_epochs",
    ),
    "batch_size": "prompts of a rollout are --rollout_batch_size, samples of an update --train_batch_size, of a "
    "forward --micro_train_batch_size",
    **dict.fromkeys(
        ("tokenizer", "processor"), "leave it out: the model's folder holds it; beside a loaded model, processing_class"
    ),
    "max_train_steps": "rollout steps are --max_steps",
    "num_samples": "samples of one prompt are --n_samples_per_prompt, rows taken of each data set --max_samples",
    "max_len": "lengths are --prompt_max_len and --generate_max_len",
    **dict.fromkeys(("betas", "adam_beta1", "adam_beta2"), "write --adam_betas 0.9 0.95"),
    **dict.fromkeys(
        ("dataset", "dataset_name", "dataset_path", "train_data", "train_file", "train_dataset"),
        "write --prompt_data PATH, a file, a saved data set folder, or a name of the hub",
    ),
    **dict.fromkeys(("eval_dataset", "eval_file", "val_dataset"), "write --eval_data PATH"),
    **dict.fromkeys(
        ("cutoff_len", "max_length", "max_seq_length", "max_tokens"),
        "lengths are --prompt_max_len and --generate_max_len",
    ),
    **dict.fromkeys(
        ("rlhf_type", "stage"), "leave it out: the command names the algorithm, lightrft-visual train grpo"
    ),
    **dict.fromkeys(
        ("finetuning_type", "train_type", "tuner_type"), "write --lora_rank R for LoRA; 0 trains all parameters"
    ),
    "template": "leave it out: the model's folder holds its chat template; --apply_chat_template turns it off",
    **dict.fromkeys(
        ("freeze_vit", "freeze_vision_tower"), "write --freeze_prefix true for a vision tower that does not train"
    ),
    "importance_sampling_level": "sequence is --policy_loss gspo, token is the default, --policy_loss ppo",
    "top_entropy_quantile": "write --high_entropy_token_ratio Q",
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
        "write --ref_update_steps N, in rollout steps, and --ref_update_mixup A",
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "enable_vllm_is_correction", "vllm_is_truncated_threshold"),
        "write --tis_mode token, and --tis_cap C for the largest weight",
    ),
    "ring_attn_size": "write --sp_size N, the number of ranks that share a sequence",
    **dict.fromkeys(("async_train", "async_queue_size"), "write --placement split --max_staleness 1"),
    "norm_adv_by_std_in_grpo": "where it is false write --advantage_estimator dr_grpo",
    "filter_overlong_prompts": "write --on_long_prompt skip",
    "truncation": _ALWAYS + "no prompt is cut; --on_long_prompt skip leaves out those that are too long",
    **dict.fromkeys(
        ("tool_config_path", "max_assistant_turns", "max_user_turns", "max_turns_per_episode"),
        "write --environment FILE.py:CLASS or --tools FILE.py:FUNCTION, and --max_turns N",
    ),
    **dict.fromkeys(
        ("resume_mode", "find_last_checkpoint"),
        "write --load_checkpoint for the newest checkpoint of --output_dir, or --resume_from FOLDER",
    ),
    "val_before_train": _ALWAYS + "a run with --eval_data evaluates the model as it is first",
    "reward_weights": "a weight stands behind its reward, --components.NAME WEIGHT, or in a --reward_recipe",
    "dynamic_filtering": "write --dynamic_sampling: prompts whose rewards are all equal are replaced",
    "format_prompt": "write its words into the prompts of the data, or what may stand before each of them as "
    "--system_prompt TEXT; those of math.jinja, behind the column problem, are --data_format geometry3k",
    "use_kl_in_reward": "leave it out: the KL is in the reward, with --use_kl_loss --kl_estimator k3 in the loss, and "
    "--init_kl_coef 0 turns it off",
    "use_dynamic_bsz": "write --packing_samples --max_tokens_per_batch N, which fills micro-batches by tokens",
    "args": "leave it out: each setting is a keyword of the trainer",
    "peft_config": "write --lora_rank R, --lora_alpha A and --target_modules NAMES",
    "push_to_hub": "leave it out: checkpoint-final is a folder that `hf upload` takes",
    **dict.fromkeys(
        ("custom_reward_function.path", "custom_reward_function.name"), "write --reward_fn path.py:function"
    ),
    **dict.fromkeys(("logger", "trackers"), "write --use_wandb or --use_tensorboard; files and the console always are"),
    "reward.clip_range": "write --reward_clip C, one number: rewards are cut to [-C, C]",
    "train.async_enable": "write --placement split --max_staleness 1",
    "agent_func_path": "write --environment FILE.py:AgentExecutor",
    "environment_factory": "write --environment FILE.py:CLASS",
    "max_tool_calling_iterations": "write --max_turns N, the number of answers: one more than of iterations",
    "project_name": "write --use_wandb and set the environment variable WANDB_PROJECT",
    "disable_kl": "write --init_kl_coef 0 where it is true",
    **dict.fromkeys(
        ("reward_model", "reward_funcs"),
        "write --reward_pretrain FOLDER for a reward model, --reward_fn path.py:function or --remote_rm_url URL",
    ),
    **dict.fromkeys(("model_path", "model_name"), "write --pretrain"),
    **dict.fromkeys(("use_peft", "use_lora"), "write --lora_rank R; 0 turns LoRA off"),
    **dict.fromkeys(
        ("mixed_precision", "fp16", "torch_dtype", "dtype"), "write --bf16; without it everything is float32"
    ),
    "use_flash_attn": "write --attn_implementation flash_attention_2",
    "resolution": "write --height and --width (pixels)",
    "sample.train_batch_size": "images that a rank draws at once are --micro_rollout_batch_size",
    "sample.num_batches_per_epoch": "prompts of a rollout are --rollout_batch_size: batches of all ranks, times images "
    "of a batch, by images of a prompt",
    "sample.test_batch_size": "images that a rank draws at once are --micro_rollout_batch_size",
    "per_prompt_stat_tracking": "leave it out: images are compared with those of their prompt; --global_std divides by "
    "the standard deviation of all",
    "prompt_fn": "write --prompt_data FILE, of prompts in a text file, or of rows",
    **{
        f"reward_fn.{there}": f"write --components.{here} WEIGHT"
        for there, here in (
            ("pickscore", "pick_score"),
            ("imagereward", "image_reward"),
            ("clipscore", "clip_score"),
            ("ocr", "ocr"),
            ("geneval", "geneval"),
            ("aesthetic", "aesthetic"),
            ("unifiedreward", "unified_reward"),
            ("jpeg_compressibility", "jpeg_compressibility"),
        )
    },
    "lora_base_model": "write --trainable_models NAMES",
    "use_vllm": "leave it out: images are drawn by diffusers",
    **dict.fromkeys(
        ("colocate_all_models", "colocate_actor_ref", "train.colocate_all"),
        "leave it out: every rank trains, holds the reference and generates",
    ),
    **{
        f"{role}_num_{unit}": "processes are not placed by role: every rank has every role, and deepspeed --num_gpus N "
        "script.py says how many there are"
        for role in ("actor", "ref", "critic", "reward")
        for unit in ("nodes", "gpus_per_node")
    },
    **dict.fromkeys(
        ("vllm_num_engines", "vllm.num_engines"),
        "leave it out: every rank takes part in an engine, of --engine_tp_size ranks",
    ),
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config", "ds_config"),
        "leave it out: DeepSpeed is always used and configured from the settings, such as --zero_stage",
    ),
    **{
        name: f"it belongs to the launcher and goes before the script: deepspeed --{name} VALUE script.py"
        for name in ("num_gpus", "num_nodes", "master_port", "master_addr", "hostfile", "include", "exclude")
    },
    **dict.fromkeys(
        ("num_processes", "nproc_per_node", "n_gpus_per_node", "num_gpus_per_node"),
        "it belongs to the launcher and goes before the script: deepspeed --num_gpus N script.py",
    ),
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
    **LIGHTRFT,
    **dict.fromkeys(
        ("is_correction_enable", "is_correction_type", "is_correction_threshold"),
        "write --tis_mode token, and --tis_cap C for the largest weight",
    ),
    **dict.fromkeys(
        ("dynamic_filtering_range", "dynamic_filtering_reward_range", "filter_key", "filter_low", "filter_high"),
        "leave it out: --dynamic_sampling replaces prompts whose rewards are all equal",
    ),
    **dict.fromkeys(
        ("dynamic_batch_enable", "use_dynamic_batch", "dynamic_batching"),
        "write --packing_samples --max_tokens_per_batch N, which fills micro-batches by tokens",
    ),
    **dict.fromkeys(
        ("sync_backend", "vllm_sync_backend"), _ALWAYS + "weights go to the engine in the memory that both share"
    ),
    "save_hf": _ALWAYS + "checkpoint-final holds the model in the form of transformers",
    "resume_from_checkpoint": "write --resume_from FOLDER, or --resume_from auto for the newest checkpoint",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "write --eval_steps N"),
    "save_strategy": "write --save_steps N",
}


def _reward_model(folder: Any) -> dict[str, Any]:
    return {"reward_pretrain": os.path.expanduser(str(folder))}


ESTIMATORS = {  # of verl and EasyR1
    "gae": {"advantage_estimator": "gae"},
    "grpo": {"advantage_estimator": "group_norm"},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce", "advantages_norm": True},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_baseline", "advantages_norm": True},
}
LOSSES = {  # of verl and EasyR1
    **dict.fromkeys(("vanilla", "default"), {"policy_loss": "ppo"}),
    **{name: {"policy_loss": name} for name in ("gspo", "cispo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")},
    "gspo_token": {"policy_loss": "gspo"},
    "geo_mean": {"policy_loss": "gmpo"},
}
AVERAGES = {"token": {"loss_agg_mode": "token-mean"}, "seq": {"loss_agg_mode": "seq-mean-token-mean"}}
KL_FORMS = {
    **dict.fromkeys(("kl", "k1"), {"kl_estimator": "k1"}),
    **dict.fromkeys(("mse", "k2"), {"kl_estimator": "k2"}),
    **dict.fromkeys(("low_var_kl", "k3"), {"kl_estimator": "k3"}),
}


def _frozen_tower(frozen: Any) -> dict[str, Any]:
    return {"freeze_prefix": "true"} if str(frozen).lower() == "true" else {}


def _one_of(name: str, known: dict[str, dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    return by_word(known, f"{name} is {{0!r}}; of the values there, here are {', '.join(known)}")


def _so_anyway(like: str, values: str, about: str, instead: str = "") -> Translation:
    """A setting that asks for what is so anyway, with one of these values; any other value is refused by `instead`."""

    def read(value: Any) -> dict[str, Any]:
        if str(value).lower() in values.split() or not instead:
            return {}
        raise ConfigError(instead)

    return Translation(like, read, about)


# Of TRL, OpenRLHF and LightRFT: taken, and said in a line.
NEEDLESS = {
    "use_vllm": _so_anyway("bf16", "true", "not needed, vLLM is the default engine", "write --engine_type hf"),
    "vllm_mode": _so_anyway(
        "pretrain", "colocate", "not needed, the engine shares the trainer's devices", "write --placement split"
    ),
    "report_to": _so_anyway(
        "pretrain", "none", "not needed, nothing is reported elsewhere unless asked for",
        "write --use_wandb or --use_tensorboard",
    ),
    "logging_first_step": _so_anyway("bf16", "", "not needed, every step is logged"),
    "logging_strategy": _so_anyway("pretrain", "", "not needed, every step is logged"),
    "log_completions": _so_anyway("bf16", "", "not needed, rollouts/ has the completions of every step"),
    "remove_unused_columns": _so_anyway("bf16", "", "not needed, a reward gets the columns that it names"),
    "per_device_eval_batch_size": _so_anyway("pretrain", "", "not needed, evaluations take --micro_rollout_batch_size"),
    "dataloader_num_workers": _so_anyway("pretrain", "", "not needed, a run reads its rows itself"),
    "colocate_all_models": _so_anyway(
        "bf16", "true", "not needed, every rank trains and generates", "write --placement split"
    ),
    "flash_attn": _so_anyway(
        "bf16", "true", "not needed, the fastest attention that is installed is taken",
        "write --attn_implementation sdpa",
    ),
}  # fmt: skip


TRANSLATIONS: dict[str, dict[str, Translation]] = {
    "RunConfig": {
        **NEEDLESS,
        **{
            name: Translation("reward_pretrain", _reward_model, "--reward_pretrain, a local reward model (TRL)")
            for name in ("reward_model_path", "reward_model_name_or_path")
        },
        "algorithm.adv_estimator": Translation(
            "advantage_estimator", _one_of("algorithm.adv_estimator", ESTIMATORS), "grpo is group_norm (verl)"
        ),
        "actor_rollout_ref.actor.kl_loss_type": Translation(
            "kl_estimator", _one_of("kl_loss_type", KL_FORMS), "low_var_kl is --kl_estimator k3 (verl)"
        ),
        "algorithm.kl_penalty": Translation(
            "kl_estimator", _one_of("algorithm.kl_penalty", KL_FORMS), "low_var_kl is --kl_estimator k3 (EasyR1)"
        ),
        "actor_rollout_ref.actor.policy_loss.loss_mode": Translation(
            "policy_loss", _one_of("loss_mode", LOSSES), "vanilla is --policy_loss ppo (verl)"
        ),
        "worker.actor.loss_type": Translation(
            "policy_loss", _one_of("loss_type", LOSSES), "default is --policy_loss ppo (EasyR1)"
        ),
        "worker.actor.loss_avg_mode": Translation(
            "loss_agg_mode", _one_of("loss_avg_mode", AVERAGES), "seq is --loss_agg_mode seq-mean-token-mean (EasyR1)"
        ),
        "worker.actor.model.freeze_vision_tower": Translation(
            "bf16", _frozen_tower, "true is --freeze_prefix true (EasyR1); otherwise the vision tower trains"
        ),
        "actor_rollout_ref.actor.freeze_vision_tower": Translation(
            "bf16", _frozen_tower, "true is --freeze_prefix true (verl); otherwise the vision tower trains"
        ),
    },
}

SPOKEN = Spoken(ALIASES, ALIASES_OF, DIFFERENT, TRANSLATIONS)
