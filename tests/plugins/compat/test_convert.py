"""Files of other systems as a command."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ALGORITHMS
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
    assert words[:2] == ["lightrft-visual", "train"]
    root, defaults = ALGORITHMS[words[2]]
    return parse_run(root.schema, argv=words[3:], preset=root.preset, defaults=defaults).config


def test_trl_script_keywords_are_settings_and_the_rest_says_why(converted):
    found = converted("trl", "train.py", TRL)
    config = settings(found)
    assert config.model.pretrain == "Qwen/Qwen2.5-VL-3B-Instruct" and config.model.bf16
    assert (config.rollout.n_samples_per_prompt, config.rollout.generate_max_len) == (8, 128)
    assert (config.algorithm.init_kl_coef, config.algorithm.kl_estimator) == (0.04, "k3")
    assert config.algorithm.use_kl_loss and "--reward_fn" in found.left_out["reward_funcs"]
    assert found.left_out["nonsense"] == "nothing here has this name or is like it"


def test_verl_script_variables_are_put_in_and_others_stay(converted):
    found = converted("verl", "run.sh", VERL)
    assert '--prompt_data "$HOME/train.parquet"' in found.command
    config = settings(found)
    assert config.model.pretrain == "Qwen/Qwen2.5-VL-7B-Instruct" and config.rollout.rollout_batch_size == 512
    assert config.algorithm.advantage_estimator == "group_norm" and list(found.left_out) == ["trainer.n_gpus_per_node"]


def test_template_of_easyr1_is_told_where_its_words_go(converted):
    for name, text in (("c.yaml", "data: {format_prompt: math.jinja}"), ("c.sh", "python main data.format_prompt=m")):
        (told,) = converted("easyr1", name, text).left_out.values()
        assert "prompts of the data" in told and "--system_prompt TEXT" in told and "--data_format geometry3k" in told


SECTIONS = r"""
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
   --data.prompt_dataset train.jsonl --data.image_key images --data.max_images_per_prompt 4 \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 512 --train.micro_batch_size 2 \
   --actor.adam.lr 5e-7 --actor.adam.betas 0.9 0.99 --algo.advantage.estimator rloo --algo.kl.init_coef 0.02 \
   --ds.zero_stage 3 --ds.lora.rank 16 --vllm.gpu_memory_utilization 0.6 --ckpt.output_dir out \
   --eval.dataset dev.jsonl --train.agent_func_path agent.py --vllm.num_engines 4 --reward.clip_range -5 5
"""


def test_openrlhf_script_of_settings_in_sections_converts(converted):
    found = converted("openrlhf", "run.sh", SECTIONS)
    config = settings(found)
    assert (config.model.pretrain, config.data.prompt_data) == ("Qwen/Qwen2.5-VL-3B-Instruct", "train.jsonl")
    assert (config.data.eval_data, config.output.output_dir) == ("dev.jsonl", "out")
    rollout, train = config.rollout, config.train
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, train.train_batch_size) == (128, 8, 512)
    assert (train.actor_learning_rate, list(train.adam_betas)) == (5e-7, [0.9, 0.99])
    assert (config.algorithm.advantage_estimator, config.algorithm.init_kl_coef) == ("rloo", 0.02)
    assert (config.distributed.zero_stage, config.model.lora_rank, rollout.engine_mem_util) == (3, 16, 0.6)
    assert "--environment FILE.py:AgentExecutor" in found.left_out.pop("train.agent_func_path")
    assert config.algorithm.reward_clip == 5
    assert list(found.left_out) == ["vllm.num_engines"]


def test_words_of_other_commands_and_of_the_launcher_are_no_settings(converted):
    text = """
python -m openrlhf.models.remote_rm --dataset d.jsonl --input_key message > log.txt 2>&1 &
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
    --pretrain m --input_key question --bf16 $@ 2>&1 | tee run.log; echo --label_key x
"""
    found = converted("openrlhf", "run.sh", text)
    config = settings(found)
    assert (config.data.input_key, config.data.label_key, config.model.bf16) == ("question", "label", True)
    assert "launcher" in found.left_out["address"] and "dataset" not in found.left_out


def test_variables_with_defaults_comments_arithmetic_and_arrays_are_put_in(converted):
    text = """
SIZE=$((1024 * 2))
NAME="run a"  # its name
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/x"}
DATA=(
    data.max_response_length=$((SIZE + 2**3))   # tokens
    trainer.experiment_name="$NAME"
)
FLAGS="data.max_prompt_length=$SIZE actor_rollout_ref.rollout.n=4"
if [ -z "$X" ]; then
    python3 -m verl.trainer.main_ppo "${DATA[@]}" $FLAGS actor_rollout_ref.model.path="${MODEL_PATH}" \\
        actor_rollout_ref.actor.optim.lr=${1:-2e-6} "$@"
fi
"""
    found = converted("verl", "run.sh", text)
    assert '--pretrain "$HOME/models/x"' in found.command
    config = settings(found)
    assert (config.rollout.generate_max_len, config.rollout.prompt_max_len) == (2056, 2048)
    assert (config.output.run_name, config.rollout.n_samples_per_prompt) == ("run a", 4)
    assert config.train.actor_learning_rate == 2e-6


def test_output_of_commands_stays_for_the_shell(converted):
    text = """
STAMP=$(date "+%F %T")
HERE="$(dirname "$0")"
python3 -m verl.trainer.main_ppo data.train_files=`pwd`/a.parquet \\
    trainer.default_local_dir=out/$STAMP/$(date +%s) trainer.experiment_name="run $(git log -1 --format='%h')" \\
    actor_rollout_ref.model.path=$HERE/model actor_rollout_ref.rollout.n=4
"""
    words = shlex.split(converted("verl", "run.sh", text).command)
    assert "$(pwd)/a.parquet" in words and "out/$(date '+%F %T')/$(date +%s)" in words
    assert "run $(git log -1 --format='%h')" in words and "$(dirname $0)/model" in words
    assert words[words.index("--n_samples_per_prompt") + 1] == "4"


def test_flag_of_several_words_takes_all_of_them(converted):
    text = """
x.py --adam_betas 0.9 0.99 --eps_clip_low_high 0.2 0.3 --lora_target_modules "q_proj", "v_proj" --max_steps -1
"""
    config = settings(converted("openrlhf", "run.sh", text))
    assert config.train.adam_betas == [0.9, 0.99] and config.model.target_modules == "q_proj,v_proj"
    assert (config.algorithm.eps_clip, config.algorithm.eps_clip_high) == (0.2, 0.3)


def test_script_whose_variables_name_themselves_ends(converted):
    found = converted("trl", "run.sh", "A=$A/x\nB=$B$B$A\nx.py --output_dir $B --seed $((1/0))\n")
    assert '--output_dir "$B$B$A/x"' in found.command and "seed" in found.left_out


def test_python_names_are_followed_and_what_is_computed_is_left_out(converted):
    text = """
model_id = "Qwen/Qwen2.5-VL-3B-Instruct"
model = AutoModelForImageTextToText.from_pretrained(model_id, dtype=torch.bfloat16)
more = {"num_generations": 4}
args = GRPOConfig(output_dir=f"out-{user}", bf16=torch.cuda.is_available(), max_prompt_length=None, **more, **rest)
GRPOTrainer(model=model, args=args, peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
"""
    found = converted("trl", "train.py", text)
    config = settings(found)
    assert (config.model.pretrain, config.rollout.n_samples_per_prompt) == ("Qwen/Qwen2.5-VL-3B-Instruct", 4)
    assert (config.model.lora_rank, config.model.target_modules) == (16, "q_proj,v_proj")
    assert list(found.left_out) == ["output_dir", "bf16", "max_prompt_length", "**rest", "rollout_batch_size"]
    assert "computed" in found.left_out["bf16"] and "not set" in found.left_out["max_prompt_length"]


def test_what_needs_no_setting_here_is_listed(converted):
    found = converted("trl", "run.sh", "x.py --num_generations 8 --use_vllm --vllm_mode colocate\n")
    assert (
        list(found.left_out) == ["use_vllm", "vllm_mode", "rollout_batch_size"]
        and "not needed" in found.left_out["use_vllm"]
    )


def test_kl_that_verl_turns_off_is_off(converted):
    text = """
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.002
"""
    found = converted("verl", "run.sh", text)
    assert settings(found).algorithm.init_kl_coef == 0
    assert {"actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"} <= found.left_out.keys()


def test_kl_form_of_easyr1_goes_with_its_loss(converted):
    text = "algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 0.01}\n"
    config = settings(converted("easyr1", "c.yaml", text)).algorithm
    assert (config.use_kl_loss, config.kl_estimator, config.init_kl_coef) == (True, "k3", 0.01)


def test_easyr1_split_behind_the_name_is_the_split(converted):
    config = settings(converted("easyr1", "run.sh", "python3 -m verl.trainer.main data.train_files=a/b@train\n"))
    assert (config.data.prompt_data, config.data.prompt_split) == ("a/b", "train")


def test_several_files_are_one_list_with_commas(converted):
    in_yaml = converted("verl", "c.yaml", "data: {train_files: [a.parquet, b.parquet]}\n")
    in_shell = converted(
        "verl", "run.sh", """python3 -m verl.x data.train_files="['$HOME/a.parquet', 'b.parquet']"\n"""
    )
    assert settings(in_yaml).data.prompt_data == "a.parquet,b.parquet"
    assert '--prompt_data "$HOME/a.parquet,b.parquet"' in in_shell.command


def test_yaml_interpolation_is_put_in_or_left_out(converted):
    whole = "trainer: {experiment_name: x, default_local_dir: 'out/${trainer.experiment_name}'}\n"
    assert settings(converted("verl", "c.yaml", whole)).output.output_dir == "out/x"
    found = converted("verl", "c.yaml", "trainer: {default_local_dir: 'out/${hydra:job.name}', total_epochs: 2}\n")
    assert list(found.left_out) == ["trainer.default_local_dir"] and settings(found).train.num_episodes == 2


def test_text_of_a_file_that_is_no_shell_script_is_quoted_whole(converted):
    text = 'system_prompt: "say $5, \'x\' and \\"y\\""\nnum_generations: 8\n'
    assert settings(converted("trl", "c.yaml", text)).data.system_prompt == "say $5, 'x' and \"y\""


def test_value_that_the_whole_refuses_is_left_out(converted):
    found = converted("trl", "train.py", 'GRPOConfig(lr_scheduler_type="cosine", num_generations=8)')
    assert settings(found).rollout.n_samples_per_prompt == 8 and "cosine_with_min_lr" in found.left_out["lr_scheduler"]


@pytest.mark.parametrize("name", ["prose.sh", "list.yaml", "empty.py"])
def test_file_without_settings_or_of_another_kind_is_a_config_error(converted, name):
    with pytest.raises(ConfigError, match="train.py cannot be read"):
        converted("trl", "train.py", "def (")
    with pytest.raises(ConfigError, match=f"{name} holds no settings"):
        converted("trl", name, {"prose.sh": "only words\n", "list.yaml": "[1, 2]\n", "empty.py": ""}[name])


def test_file_of_settings_that_a_script_names_is_to_be_converted_too(converted):
    found = converted("easyr1", "run.sh", "python3 -m verl.trainer.main config=c.yaml trainer.total_epochs=2\n")
    assert settings(found).train.num_episodes == 2 and "convert it as well" in found.left_out["config"]


@pytest.mark.parametrize(
    "system, text, verb",
    [
        ("trl", "GRPOTrainer(model='m', args=GRPOConfig(bf16=True))", "grpo"),
        ("trl", "RLOOTrainer(model='m', args=RLOOConfig(bf16=True))", "rloo"),
        ("trl", "trainer = made(RLOOConfig(bf16=True), LoraConfig(r=8))", "rloo"),
        ("trl", "MySFTTrainer('m', args=SFTConfig(bf16=True))", "sft"),
        ("openrlhf", "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --bf16", "ppo"),
        ("openrlhf", "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --advantage_estimator rloo", "grpo"),
        ("openrlhf", "python3 -m openrlhf.cli.train_sft --pretrain m --bf16", "sft"),
        ("verl", "python3 -m verl.trainer.main_ppo data.max_prompt_length=64", "ppo"),
    ],
)
def test_command_trains_by_what_the_file_trains_by(converted, system, text, verb):
    found = converted(system, "train.py" if system == "trl" else "run.sh", text)
    assert found.command.split()[2] == verb
    settings(found)


@pytest.mark.parametrize(
    "system, name, text", [("trl", "t.py", "DPOTrainer(model='m', args=DPOConfig(beta=0.1))"),
                           ("openrlhf", "run.sh", "python3 -m openrlhf.cli.train_rm --pretrain m")],
)  # fmt: skip
def test_training_without_a_counterpart_is_refused_by_name(converted, system, name, text):
    with pytest.raises(ConfigError, match=r"trains by (dpo|rm), which .* there are grpo, rloo, ppo, sft"):
        converted(system, name, text)


def test_settings_that_mean_something_else_there_reach_what_they_mean(converted):
    text = "--label_key gt --overlong_buffer_len 64 --overlong_penalty_factor 0.5 --generate_max_len 256"
    config = settings(converted("openrlhf", "run.sh", f"python3 -m openrlhf.cli.train_ppo_ray {text}"))
    assert (config.data.reference_key, config.data.label_key) == ("gt", "label")
    assert config.algorithm.overlong_buffer and config.algorithm.overlong_buffer_penalty_factor == 0.5
    text = """
algorithm: {adv_estimator: gae, use_kl_in_reward: true, kl_ctrl: {type: adaptive, kl_coef: 0.01, target_kl: 0.1}}
actor_rollout_ref: {actor: {use_kl_loss: false, policy_loss: {loss_mode: gspo}}}
custom_reward_function: {path: mine.py, name: compute}
"""
    config = settings(converted("verl", "c.yaml", text))
    assert (config.algorithm.policy_loss, config.algorithm.kl_target) == ("gspo", 0.1)
    assert config.reward.reward_fn == "mine.py:compute" and config.model.bf16
    text = text.replace("adaptive", "fixed")
    assert settings(converted("verl", "c.yaml", text)).algorithm.kl_target is None
    config = settings(converted("easyr1", "c.yaml", "worker: {actor: {loss_avg_mode: seq, loss_type: cispo}}"))
    assert (config.algorithm.loss_agg_mode, config.algorithm.policy_loss) == ("seq-mean-token-mean", "cispo")


def test_data_sets_of_a_trl_script_are_those_of_the_command(converted):
    text = """
rows = load_dataset("org/rows", split="train")
part = load_dataset("org/rows", split="train[:5%]")
GRPOTrainer("org/model", train_dataset=rows, eval_dataset=part)
"""
    found = converted("trl", "train.py", text)
    config = settings(found)
    assert (config.model.pretrain, config.data.prompt_data, config.data.eval_data) == ("org/model", "org/rows", None)
    assert "--eval_data PATH" in found.left_out["eval_dataset"]
    found = converted("trl", "run.sh", "trl grpo --model_name_or_path org/model --dataset_name org/rows")
    assert settings(found).data.prompt_data == "org/rows"


def test_verl_defaults_that_are_others_here_stand_in_the_command(converted):
    found = converted("verl", "run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo x.y=1\n")
    config = settings(found)
    assert (config.train.lr_scheduler, config.train.lr_warmup_ratio, config.train.l2) == (
        "constant_with_warmup",
        0,
        0.01,
    )
    assert (list(config.train.adam_betas), config.train.num_episodes) == ([0.9, 0.999], 30)
    assert (config.rollout.rollout_batch_size, config.train.groups_per_update) == (1024, 256)
    assert (config.algorithm.init_kl_coef, config.algorithm.dual_clip) == (0, 3.0)
    assert {"lr_scheduler", "dual_clip"} <= {*found.unset} and "value_clip" not in found.unset  # of a critic
    config = settings(converted("verl", "run.sh", "python3 -m verl.trainer.main_ppo data.max_prompt_length=64\n"))
    assert (config.algorithm.lambd, config.algorithm.value_clip) == (1.0, 0.5)
    assert config.algorithm.advantages_norm  # its gae always whitens


def test_easyr1_defaults_and_the_file_that_a_script_names(converted, tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text("worker: {rollout: {n: 5}, actor: {max_grad_norm: 0.5}}\n")
    text = "python3 -m verl.trainer.main config=examples/config.yaml worker.actor.model.lora.rank=64\n"
    config = settings(converted("easyr1", "examples/run.sh", text))
    assert (config.rollout.n_samples_per_prompt, config.train.max_norm, config.model.lora_rank) == (5, 0.5, 64)
    assert (config.algorithm.eps_clip, config.algorithm.eps_clip_high, config.algorithm.dual_clip) == (0.2, 0.3, 3.0)
    assert (config.algorithm.init_kl_coef, config.algorithm.use_kl_loss) == (0.001, False)
    found = converted("easyr1", "run.sh", "python3 -m verl.trainer.main config=gone.yaml trainer.total_epochs=2\n")
    assert not found.unset and "convert it as well" in found.left_out["config"]
    assert "kl" not in found.command  # which that file may set


def test_losses_of_verl_and_easyr1_are_averaged_as_they_do(converted):
    text = "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean}}\n"
    assert settings(converted("verl", "c.yaml", text)).algorithm.loss_agg_mode == "seq-mean-token-mean"
    config = settings(converted("easyr1", "c.yaml", "worker: {actor: {loss_type: gspo_token, loss_avg_mode: seq}}"))
    assert (config.algorithm.policy_loss, config.algorithm.loss_agg_mode) == ("gspo", "seq-mean-token-mean")


def test_verl_settings_that_depend_on_others(converted):
    text = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \\
    actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.5 \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 data.filter_overlong_prompts=True data.train_max_samples=-1 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 trainer.total_training_steps=200 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=128 reward_model.model.path=m actor_rollout_ref.model.path=m
"""
    found = converted("verl", "run.sh", text)
    config = settings(found)
    assert (config.algorithm.advantage_estimator, config.algorithm.init_kl_coef) == ("dr_grpo", 0.002)
    assert config.algorithm.kl_estimator == "k3" and "one KL" in found.left_out["algorithm.kl_ctrl.kl_coef"]
    assert (config.data.on_long_prompt, config.train.lr_warmup_ratio) == ("skip", 0.05)
    assert config.algorithm.overlong_buffer and config.algorithm.overlong_buffer_len == 128
    assert config.reward.reward_pretrain is None and "reward_model.model.path" in found.left_out


def test_supervised_files_of_verl_and_openrlhf_convert(converted):
    text = """
torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet data.train_batch_size=64 \\
    model.partial_pretrain=org/model optim.lr=1e-4 trainer.total_epochs=2 model.lora_rank=32
"""
    config = settings(converted("verl", "run.sh", text))
    assert (config.data.prompt_data, config.train.train_batch_size) == ("a.parquet", 64)
    assert (config.model.pretrain, config.model.lora_rank) == ("org/model", 32)
    assert (config.train.actor_learning_rate, config.train.num_episodes) == (1e-4, 2)
    text = """
deepspeed --module openrlhf.cli.train_sft --data.dataset d --data.output_key answer --train.batch_size 256 \\
    --train.max_epochs 3 --adam.lr 5e-6 --ds.zero_stage 3 --ckpt.output_dir out
"""
    config = settings(converted("openrlhf", "run.sh", text))
    assert (config.data.prompt_data, config.data.response_key, config.train.num_episodes) == ("d", "answer", 3)
    assert (config.train.actor_learning_rate, config.distributed.zero_stage) == (5e-6, 3)
    flat = "deepspeed --module openrlhf.cli.train_sft --dataset d --max_epochs 2 --learning_rate 1e-5 --bf16\n"
    assert settings(converted("openrlhf", "run.sh", flat)).train.num_episodes == 2


def test_openrlhf_defaults_that_are_others_here(converted):
    text = "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator reinforce_baseline"
    config = settings(converted("openrlhf", "run.sh", f"{text} --max_len 3000 --generate_max_len 2000\n"))
    assert config.algorithm.advantages_norm and config.algorithm.reward_clip == 10
    assert (config.rollout.prompt_max_len, config.data.apply_chat_template, config.model.bf16) == (1000, False, True)
    config = settings(converted("openrlhf", "run.sh", f"{text} --no_advantage_std_norm --freeze_visual_encoder\n"))
    assert not config.algorithm.advantages_norm and config.model.freeze_prefix == "true"


def test_trl_sizes_and_steps_count_what_they_count_there(converted):
    text = """
accelerate launch --num_processes 4 train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --num_generations 8 --steps_per_generation 16 --max_steps 100 --save_steps 10 --warmup_steps 10
"""
    found = converted("trl", "run.sh", text)
    config = settings(found)
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (16, 8)  # 2 * 16 * 4 / 8
    assert (config.train.micro_train_batch_size, config.train.gradient_accumulation_steps) == (2, 8)
    assert (config.train.max_steps, config.output.save_steps, config.train.lr_warmup_ratio) == (50, 5, 0.1)
    assert "rollout_batch_size" not in found.left_out
    found = converted("trl", "run.sh", "train.py --per_device_train_batch_size 1 --num_generations 8\n")
    assert "1 samples of each rank" in found.left_out["rollout_batch_size"]


def test_trl_losses_scales_and_adapters(converted):
    text = """
args = GRPOConfig(loss_type="dr_grpo", scale_rewards=False, beta=0.0, top_k=0, lr_scheduler_type="constant")
GRPOTrainer("m", args=args, peft_config=LoraConfig(r=32))
"""
    found = converted("trl", "t.py", text)
    config = settings(found)
    algorithm = config.algorithm
    assert (algorithm.loss_agg_mode, algorithm.advantage_estimator) == ("seq-mean-token-sum-norm", "dr_grpo")
    assert algorithm.init_kl_coef == 0 and config.rollout.top_k == -1
    assert (config.train.lr_scheduler, config.train.num_episodes) == ("constant_with_warmup", 3)
    assert (config.model.lora_rank, config.model.lora_alpha) == (32, 8) and "q_proj" in found.left_out["target_modules"]
    text = "GRPOTrainer('m', args=GRPOConfig(loss_type='cispo', epsilon_high=5.0, importance_sampling_level='token'))"
    algorithm = settings(converted("trl", "t.py", text)).algorithm
    assert (algorithm.policy_loss, algorithm.eps_clip, algorithm.eps_clip_high) == ("cispo", 1.0, 4.0)
    config = settings(converted("trl", "run.sh", "train.py --use_peft --lora_target_modules q_proj v_proj\n"))
    assert (config.model.lora_rank, config.model.lora_alpha, config.model.lora_dropout) == (16, 32, 0.05)
    found = converted("trl", "run.sh", "train.py --lora_r 8 --bf16\n")
    assert settings(found).model.lora_rank == 0 and "use_peft" in found.left_out["lora_rank"]
    found = converted("trl", "t.py", "RLOOTrainer('m', args=RLOOConfig(beta=0.1, num_iterations=2))")
    algorithm = settings(found).algorithm
    assert (algorithm.init_kl_coef, algorithm.use_kl_loss) == (0.1, False)
    assert algorithm.loss_agg_mode == "seq-mean-token-sum" and "whole responses" in found.left_out["loss"]


def test_file_in_utf_8_is_read_wherever_it_is_run(tmp_path):
    (tmp_path / "t.py").write_bytes("\ufeffGRPOTrainer('m', args=GRPOConfig(run_name='läuft'))".encode())
    code = f"from pathlib import Path\nfrom {convert.__module__} import convert\n"
    code += "print(ascii(convert('trl', Path('t.py')).command))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "LC_ALL": "C", "PYTHONUTF8": "0"}
    environment |= {"PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "l\\xe4uft" in done.stdout, done.stderr


def test_trl_script_whose_settings_come_from_its_command_line_has_no_defaults(converted):
    text = "script, args, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()\n"
    found = converted("trl", "t.py", text + "GRPOTrainer(model=model.model_name_or_path, args=args)\n")
    assert found.command == "lightrft-visual train grpo" and "shell script" in found.left_out["args"]
