"""Names that users of other systems type, and the names they reach here.

An alias is listed only where it means exactly the same. A name whose meaning differs is listed in ``DIFFERENT`` with
what to write instead, so that it is refused with advice and never quietly reinterpreted.
"""

from __future__ import annotations

# alias -> leaf name, or several leaf names that share the values given. An alias may lead to another alias: the first
# name on the way that the schema has is the one that is set. Aliases whose leaf a schema lacks do not exist there.
ALIASES: dict[str, str | tuple[str, ...]] = {
    # TRL
    "model_name_or_path": "pretrain",
    "lr": "learning_rate",
    "learning_rate": "actor_learning_rate",
    "num_generations": "n_samples_per_prompt",
    "max_prompt_length": "prompt_max_len",
    "max_completion_length": "generate_max_len",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "num_iterations": "max_epochs",
    "num_train_epochs": "num_episodes",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_ratio": "lr_warmup_ratio",
    "weight_decay": "l2",
    "max_grad_norm": "max_norm",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "vllm_gpu_memory_utilization": "engine_mem_util",
    "vllm_tensor_parallel_size": "engine_tp_size",
    # OpenRLHF and LightRFT
    "loss": "policy_loss",
    "loss_type": "policy_loss",
    "policy_loss_type": "policy_loss",
    "eps_clip_low_high": ("eps_clip", "eps_clip_high"),
    "entropy_loss_coef": "entropy_coef",
    "vllm_mem_util": "engine_mem_util",
    "vllm_enable_sleep": "enable_engine_sleep",
    "save_dir": "output_dir",
    # VRL
    "trainer.output_dir": "output_dir",
    "trainer.resume_from": "resume_from",
}

# Settings that may stand alone on the command line without being a bool, and the value they then take.
BARE_VALUES: dict[str, str] = {"freeze_prefix": "true"}

# name -> what to write instead
DIFFERENT: dict[str, str] = {
    "beta": "TRL's beta is a KL term in the loss: write --init_kl_coef X --use_kl_loss --kl_estimator k3",
    "per_device_train_batch_size": "write --micro_train_batch_size (samples per rank and forward) and "
    "--train_batch_size (samples per optimizer step over all ranks)",
    "gradient_accumulation_steps": "it follows from --train_batch_size, --micro_train_batch_size and the rank count",
}
