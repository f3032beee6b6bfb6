"""Settings under the names of other systems: read where they mean the same, else answered by what to write."""

import re

import pytest

from lightrft_visual.config.leaves import names_of
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import DIFFERENT, ROOTS
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.compat.names import SPOKEN


def refused(*argv: str, schema: type, preset=None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(schema, list(argv), preset=preset)
    return str(error.value)


FOREIGN = {  # typed, in a vision-language and in a diffusion run -> what the answer must say ('' for: nothing special)
    "beta": ("--init_kl_coef X --use_kl_loss", None),
    "train.beta": ("--init_kl_coef X --use_kl_loss", None),
    "kl_loss_coef": ("--init_kl_coef", "--beta"),
    "max_new_tokens": (None, ""),
    "num_epochs": ("--num_episodes", "--num_episodes"),
    "clip_ratio": (None, "--clip_range"),
    "num_samples": ("--n_samples_per_prompt", "--max_samples"),
    "dataset": ("--prompt_data", "--prompt_data"),
    "dataset_name": ("--prompt_data", "--prompt_data"),
    "enable_liger_kernel": (None, ""),
    "use_liger_loss": ("without holding all logits", "without holding all logits"),
    "use_peft": ("--lora_rank", "--lora_rank"),
    "use_vllm": ("--engine_type", "diffusers"),
    "scale_rewards": ("--advantage_estimator", ""),
    "loss_type": ("--loss_agg_mode seq-mean-token-mean", ""),
    "mixed_precision": ("--bf16", "--bf16"),
    "wandb_project": ("WANDB_PROJECT", "WANDB_PROJECT"),
    "wandb_api_key": ("WANDB_API_KEY", "WANDB_API_KEY"),
    "num_gpus": ("deepspeed --num_gpus", "deepspeed --num_gpus"),
    "master_port": ("deepspeed --master_port", "deepspeed --master_port"),
    "deepspeed": ("--zero_stage", "--zero_stage"),
    "agent_func_path": ("--environment FILE.py:AgentExecutor", ""),
    "environment_factory": ("--environment FILE.py:CLASS", ""),
    "max_tool_calling_iterations": ("--max_turns N", ""),
    "flash_attn": ("--attn_implementation", ""),
    "reward_model": ("--reward_pretrain", "--reward_pretrain"),
    "resolution": ("", "--height and --width"),
    "lr_scheduler": (None, "--lr_scheduler_type"),
    "betas": ("--adam_betas", "--adam_betas"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", [0, 1], ids=lambda kind: ROOTS[kind].kind)
def test_names_of_other_systems_are_answered_by_what_this_run_has(name: str, kind: int) -> None:
    wanted, names = FOREIGN[name][kind], names_of(ROOTS[kind].schema)
    if wanted is None:  # a setting here
        assert names.find(name)
        return
    message = refused(f"--{name}", "1", schema=ROOTS[kind].schema, preset=None)
    assert wanted in message and ("did you mean" not in message or "did you mean" in wanted), message
    assert all(names.find(flag) for flag in re.findall(r"(?<!deepspeed )--(\w+)", message) if flag != "help"), message


def test_every_advice_is_given_somewhere() -> None:
    for name in {**DIFFERENT, **SPOKEN.different}:
        assert any(not names_of(root.schema).find(name) and names_of(root.schema).hint(name) for root in ROOTS), name
