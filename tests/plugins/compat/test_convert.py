"""Files of other systems as a command."""

from __future__ import annotations

import shlex

import pytest

from lightrft_visual.config.load import parse_run
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.compat.convert import convert

TRL = """
args = GRPOConfig(output_dir="out", num_generations=8, max_completion_length=128, beta=0.04, bf16=True, nonsense=3)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-VL-3B-Instruct", args=args, reward_funcs=score)
"""
VERL = r"""
MODEL=Qwen/Qwen2.5-VL-7B-Instruct
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=512 \
    actor_rollout_ref.model.path=$MODEL \
    data.train_files=$HOME/train.parquet \
    trainer.n_gpus_per_node=8
"""
EASYR1 = """
data:
  rollout_batch_size: 512
worker:
  actor:
    optim: {lr: 1.0e-6}
trainer:
  nnodes: 1
"""
OPENRLHF = r"""
deepspeed --module openrlhf.cli.train_ppo_ray \
   --n_samples_per_prompt 8 \
   --actor_learning_rate 5e-7 \
   --ref_num_nodes 1 \
   --bf16
"""


@pytest.fixture
def converted(tmp_path):
    def run(system, name, text):
        file = tmp_path / name
        file.write_text(text)
        return convert(system, file)

    return run


def settings(found):
    """The command's settings, as a run reads them."""
    words = shlex.split(found.command.replace("\\\n", " "))
    assert words[:3] == ["lightrft-visual", "train", "grpo"]
    return parse_run(argv=words[3:]).config


def test_trl_script_keywords_are_settings_and_the_rest_says_why(converted):
    found = converted("trl", "train.py", TRL)
    config = settings(found)
    assert config.model.pretrain == "Qwen/Qwen2.5-VL-3B-Instruct" and config.model.bf16
    assert (config.rollout.n_samples_per_prompt, config.rollout.generate_max_len) == (8, 128)
    assert "--init_kl_coef" in found.left_out["beta"] and "--reward_fn" in found.left_out["reward_funcs"]
    assert found.left_out["nonsense"] == "nothing here has this name or is like it"


def test_verl_script_variables_are_put_in_and_others_stay(converted):
    found = converted("verl", "run.sh", VERL)
    assert '--prompt_data "$HOME/train.parquet"' in found.command
    config = settings(found)
    assert config.model.pretrain == "Qwen/Qwen2.5-VL-7B-Instruct" and config.rollout.rollout_batch_size == 512
    assert config.algorithm.advantage_estimator == "group_norm" and list(found.left_out) == ["trainer.n_gpus_per_node"]


def test_easyr1_yaml_and_openrlhf_script_convert(converted):
    easyr1, openrlhf = converted("easyr1", "c.yaml", EASYR1), converted("openrlhf", "run.sh", OPENRLHF)
    assert settings(easyr1).train.actor_learning_rate == 1e-6 and list(easyr1.left_out) == ["trainer.nnodes"]
    config = settings(openrlhf)
    assert config.train.actor_learning_rate == 5e-7 and config.model.bf16
    assert "processes are not placed by role" in openrlhf.left_out["ref_num_nodes"]


def test_file_that_is_not_what_its_name_says_is_a_config_error(converted):
    with pytest.raises(ConfigError, match="train.py cannot be read"):
        converted("trl", "train.py", "def (")
