"""Files of other systems as a command."""

import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ALGORITHMS
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.compat.convert import convert


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


# What a file means: (system, file, text, settings of the command, {what is left out: a word of the reason}).
MEANINGS = {
    "keywords of a TRL script": ("trl", "train.py", """
args = GRPOConfig(output_dir="out", num_generations=8, max_completion_length=128, beta=0.04, bf16=True, nonsense=3)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-VL-3B-Instruct", args=args, reward_funcs=score)
""", "model.pretrain=Qwen/Qwen2.5-VL-3B-Instruct model.bf16=true rollout.n_samples_per_prompt=8 "
     "rollout.generate_max_len=128 algorithm.init_kl_coef=0.04 algorithm.kl_estimator=k3 algorithm.use_kl_loss=true",
     {"nonsense": "nothing here has this name or is like it", "reward_funcs": "--reward_fn", "rollout_batch_size": ""}),
    "TRL's sum of normalised rewards and its KL without bias": ("trl", "train.py", """
args = GRPOConfig(beta=0.04, use_bias_correction_kl=True, scale_rewards="group",
                  multi_objective_aggregation="normalize_then_sum", off_policy_mask_threshold=0.5)
""", "algorithm.kl_estimator=k3_unbiased algorithm.use_kl_loss=true algorithm.advantage_estimator=gdpo "
     "algorithm.off_policy_delta=0.5", None),
    "TRL's KL without bias, which has no weight": ("trl", "train.py", """
args = GRPOConfig(use_bias_correction_kl=True, multi_objective_aggregation="sum_then_normalize", scale_rewards="batch")
""", "algorithm.init_kl_coef=0", {"scale_rewards": "spread of the batch", "rollout_batch_size": ""}),
    "sections of OpenRLHF": ("openrlhf", "run.sh", r"""
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
   --data.prompt_dataset train.jsonl --data.image_key images --data.max_images_per_prompt 4 \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 512 --train.micro_batch_size 2 \
   --actor.adam.lr 5e-7 --actor.adam.betas 0.9 0.99 --algo.advantage.estimator rloo --algo.kl.init_coef 0.02 \
   --ds.zero_stage 3 --ds.lora.rank 16 --vllm.gpu_memory_utilization 0.6 --ckpt.output_dir out \
   --eval.dataset dev.jsonl --train.agent_func_path agent.py --vllm.num_engines 4 --reward.clip_range -5 5
""", "model.pretrain=Qwen/Qwen2.5-VL-3B-Instruct data.prompt_data=train.jsonl data.eval_data=dev.jsonl "
     "output.output_dir=out rollout.rollout_batch_size=128 rollout.n_samples_per_prompt=8 train.train_batch_size=512 "
     "train.actor_learning_rate=5e-7 train.adam_betas=[0.9,0.99] algorithm.advantage_estimator=rloo "
     "algorithm.init_kl_coef=0.02 distributed.zero_stage=3 model.lora_rank=16 rollout.engine_mem_util=0.6 "
     "algorithm.reward_clip=5",
     {"train.agent_func_path": "--environment FILE.py:AgentExecutor", "vllm.num_engines": ""}),
    "words of other commands and of the launcher": ("openrlhf", "run.sh", """
python -m openrlhf.models.remote_rm --dataset d.jsonl --input_key message > log.txt 2>&1 &
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
    --pretrain m --input_key question --bf16 $@ 2>&1 | tee run.log; echo --label_key x
""", "data.input_key=question data.label_key=label model.bf16=true", {"address": "launcher"}),
    "a flag of several words": ("openrlhf", "run.sh", """
x.py --adam_betas 0.9 0.99 --eps_clip_low_high 0.2 0.3 --lora_target_modules "q_proj", "v_proj" --max_steps -1
""", "train.adam_betas=[0.9,0.99] model.target_modules=q_proj,v_proj algorithm.eps_clip=0.2 "
     "algorithm.eps_clip_high=0.3", None),
    "names of Python are followed and what is computed is left out": ("trl", "train.py", """
model_id = "Qwen/Qwen2.5-VL-3B-Instruct"
model = AutoModelForImageTextToText.from_pretrained(model_id, dtype=torch.bfloat16)
more = {"num_generations": 4}
args = GRPOConfig(output_dir=f"out-{user}", bf16=torch.cuda.is_available(), max_prompt_length=None, **more, **rest)
GRPOTrainer(model=model, args=args, peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
""", "model.pretrain=Qwen/Qwen2.5-VL-3B-Instruct rollout.n_samples_per_prompt=4 model.lora_rank=16 "
     "model.target_modules=q_proj,v_proj",
     {"output_dir": "", "bf16": "computed", "max_prompt_length": "not set", "**rest": "", "rollout_batch_size": ""}),
    "what needs no setting here": ("trl", "run.sh", "grpo.py --num_generations 8 --use_vllm --vllm_mode colocate\n",
     "rollout.n_samples_per_prompt=8", {"use_vllm": "not needed", "vllm_mode": "", "rollout_batch_size": ""}),
    "an engine of TRL that is not vLLM": ("trl", "run.sh", "grpo.py --num_generations 8 --use_vllm False\n",
     "rollout.engine_type=hf", {"rollout_batch_size": ""}),
    "KL that verl turns off": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.002
""", "algorithm.init_kl_coef=0", {"algorithm.kl_ctrl.kl_coef": "", "actor_rollout_ref.actor.kl_loss_coef": ""}),
    "a weight of a KL that verl has off unless told": ("verl", "run.sh",
     "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_coef=0.001\n",
     "algorithm.init_kl_coef=0", {"actor_rollout_ref.actor.kl_loss_coef": "use_kl_loss says"}),
    "a setting without a value, whose default of TRL stands": ("trl", "grpo.yaml",
     "num_generations: 8\nnum_train_epochs: null\n", "train.num_episodes=3", None),
    "a quoted name with an equals sign in it": ("trl", "run.sh",
     'NAME="lr=1e-6 n=8"\ngrpo.py --num_generations 8 --run_name "$NAME" --model_name_or_path m --dataset_name d\n',
     "output.run_name='lr=1e-6 n=8'", None),
    "KL of EasyR1 goes with its loss": ("easyr1", "c.yaml",
     "algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 0.01}\n",
     "algorithm.use_kl_loss=true algorithm.kl_estimator=k3 algorithm.init_kl_coef=0.01", None),
    "older EasyR1, whose KL in the loss has a weight of its own": ("easyr1", "c.yaml", """
algorithm: {adv_estimator: grpo, kl_coef: 0.0}
worker: {actor: {use_kl_loss: true, kl_loss_coef: 1.0e-2, kl_loss_type: mse}}
trainer: {total_episodes: 1}
""", "algorithm.use_kl_loss=true algorithm.kl_estimator=k2 algorithm.init_kl_coef=0.01 train.num_episodes=1",
     {"algorithm.kl_coef": "worker.actor.use_kl_loss says"}),
    "older EasyR1, which leaves its KL in the loss": ("easyr1", "run.sh",
     "python3 -m verl.trainer.main worker.actor.kl_loss_coef=0.02 algorithm.adv_estimator=grpo\n",
     "algorithm.use_kl_loss=true algorithm.kl_estimator=k3 algorithm.init_kl_coef=0.02", {}),
    "older EasyR1, whose KL is in the reward": ("easyr1", "c.yaml", """
algorithm: {adv_estimator: grpo, kl_coef: 0.003}
worker: {actor: {use_kl_loss: false, kl_loss_coef: 1.0e-2, kl_loss_type: low_var_kl}}
""", "algorithm.use_kl_loss=false algorithm.kl_estimator=k1 algorithm.init_kl_coef=0.003",
     {f"worker.actor.kl_loss_{end}": "use_kl_loss says" for end in ("coef", "type")}),
    "the split behind a name of EasyR1": ("easyr1", "run.sh",
     "python3 -m verl.trainer.main data.train_files=a/b@train\n",
     "data.prompt_data=a/b data.prompt_split=train", None),
    "several files are one list": ("verl", "c.yaml", "data: {train_files: [a.parquet, b.parquet]}\n",
     "data.prompt_data=a.parquet,b.parquet", None),
    "interpolation of YAML": ("verl", "c.yaml",
     "trainer: {experiment_name: x, default_local_dir: 'out/${trainer.experiment_name}'}\n",
     "output.output_dir=out/x", None),
    "interpolation that only Hydra knows": ("verl", "c.yaml",
     "trainer: {default_local_dir: 'out/${hydra:job.name}', total_epochs: 2}\n",
     "train.num_episodes=2", {"trainer.default_local_dir": ""}),
    "a value that the whole refuses": ("trl", "train.py",
     'GRPOConfig(lr_scheduler_type="cosine", num_generations=8)', "rollout.n_samples_per_prompt=8",
     {"lr_scheduler": "cosine_with_min_lr", "rollout_batch_size": ""}),
    "OpenRLHF's label is the reference": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --label_key gt --overlong_buffer_len 64 --overlong_penalty_factor 0.5 "
     "--generate_max_len 256",
     "data.reference_key=gt data.label_key=label algorithm.overlong_buffer=true "
     "algorithm.overlong_buffer_penalty_factor=0.5", None),
    **{f"a KL of verl that is {kind}": ("verl", "c.yaml", f"""
algorithm: {{adv_estimator: gae, use_kl_in_reward: true, kl_ctrl: {{type: {kind}, kl_coef: 0.01, target_kl: 0.1}}}}
actor_rollout_ref: {{actor: {{use_kl_loss: false, policy_loss: {{loss_mode: gspo}}}}}}
custom_reward_function: {{path: mine.py, name: compute}}
""", f"algorithm.policy_loss=gspo algorithm.kl_target={target} reward.reward_fn=mine.py:compute model.bf16=true",
     None) for kind, target in (("adaptive", "0.1"), ("fixed", "null"))},
    "an average of EasyR1": ("easyr1", "c.yaml", "worker: {actor: {loss_avg_mode: seq, loss_type: cispo}}",
     "algorithm.loss_agg_mode=seq-mean-token-mean algorithm.policy_loss=cispo", None),
    "gspo of EasyR1 by its average": ("easyr1", "c.yaml",
     "worker: {actor: {loss_type: gspo_token, loss_avg_mode: seq}}",
     "algorithm.policy_loss=gspo algorithm.loss_agg_mode=seq-mean-token-mean", None),
    "gspo of verl averages over responses whatever is told": ("verl", "c.yaml",
     "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean}}\n",
     "algorithm.loss_agg_mode=seq-mean-token-mean", None),
    "data sets of a TRL script": ("trl", "train.py", """
rows = load_dataset("org/rows", split="train")
part = load_dataset("org/rows", split="train[:5%]")
GRPOTrainer("org/model", train_dataset=rows, eval_dataset=part)
""", "model.pretrain=org/model data.prompt_data=org/rows data.eval_data=null",
     {"eval_dataset": "--eval_data PATH", "args": ""}),
    "the data set of a TRL command": ("trl", "run.sh",
     "trl grpo --model_name_or_path org/model --dataset_name org/rows", "data.prompt_data=org/rows", None),
    "verl's gae always whitens": ("verl", "run.sh", "python3 -m verl.trainer.main_ppo data.max_prompt_length=64\n",
     "algorithm.lambd=1 algorithm.value_clip=0.5 algorithm.advantages_norm=true", None),
    "settings of verl that depend on others": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \\
    actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.5 \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 data.filter_overlong_prompts=True data.train_max_samples=-1 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 trainer.total_training_steps=200 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=128 reward_model.model.path=m actor_rollout_ref.model.path=m
""", "algorithm.advantage_estimator=dr_grpo algorithm.init_kl_coef=0.002 algorithm.kl_estimator=k3 "
     "data.on_long_prompt=skip train.lr_warmup_ratio=0.05 algorithm.overlong_buffer=true "
     "algorithm.overlong_buffer_len=128 reward.reward_pretrain=null",
     {"reward_model.model.path": "", "algorithm.kl_ctrl.kl_coef": "one KL"}),
    "supervised training of verl": ("verl", "run.sh", """
torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet data.train_batch_size=64 \\
    model.partial_pretrain=org/model optim.lr=1e-4 trainer.total_epochs=2 model.lora_rank=32
""", "data.prompt_data=a.parquet train.train_batch_size=64 model.pretrain=org/model model.lora_rank=32 "
     "train.actor_learning_rate=1e-4 train.num_episodes=2", None),
    "supervised training of OpenRLHF in sections": ("openrlhf", "run.sh", """
deepspeed --module openrlhf.cli.train_sft --data.dataset d --data.output_key answer --train.batch_size 256 \\
    --train.max_epochs 3 --adam.lr 5e-6 --ds.zero_stage 3 --ckpt.output_dir out
""", "data.prompt_data=d data.response_key=answer train.num_episodes=3 train.actor_learning_rate=5e-6 "
     "distributed.zero_stage=3", None),
    "supervised training of OpenRLHF": ("openrlhf", "run.sh",
     "deepspeed --module openrlhf.cli.train_sft --dataset d --max_epochs 2 --learning_rate 1e-5 --bf16\n",
     "train.num_episodes=2", None),
    "defaults of OpenRLHF that are others here": ("openrlhf", "run.sh",
     "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator reinforce_baseline "
     "--max_len 3000 --generate_max_len 2000\n",
     "algorithm.advantages_norm=true algorithm.reward_clip=10 rollout.prompt_max_len=1000 "
     "data.apply_chat_template=false model.bf16=true", None),
    **{f"messages of OpenRLHF's multimodal forks in {name}": ("openrlhf", "run.sh",
     f"python3 -m openrlhf.cli.train_ppo_ray --{name} {column} --advantage_estimator rloo\n",
     f"data.input_key={column} data.apply_chat_template=true", {"apply_chat_template": f"column {column}"})
       for name, column in (("input_key", "message"), ("data.input_key", "messages"))},
    "messages of OpenRLHF that are told to have no template": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --input_key message --apply_chat_template false\n",
     "data.input_key=message data.apply_chat_template=false", {}),
    "what OpenRLHF turns off": ("openrlhf", "run.sh",
     "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator reinforce_baseline "
     "--no_advantage_std_norm --freeze_visual_encoder\n",
     "algorithm.advantages_norm=false model.freeze_prefix='\"true\"'", None),
    "defaults of supervised training of TRL": ("trl", "run.sh", "trl sft --model_name_or_path org/model --bf16\n",
     "rollout.prompt_max_len=1024 rollout.generate_max_len=1024 train.actor_learning_rate=2e-5 train.num_episodes=3 "
     "train.micro_train_batch_size=8 train.gradient_accumulation_steps=1 train.lr_warmup_ratio=0", None),
    "defaults of supervised training of verl": ("verl", "run.sh", """
torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet data.prompt_key=extra_info \\
    data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer','text']
""", "train.train_batch_size=256 train.num_episodes=4 train.lr_warmup_ratio=0.1 train.l2=0.01 "
     "data.input_key=extra_info.question data.response_key=extra_info.answer.text",
     {"nproc_per_node": ""}),
    "columns of verl's supervised data that are no dictionaries": ("verl", "c.sh", """
python -m verl.trainer.fsdp_sft_trainer data.prompt_dict_keys=['content'] data.response_dict_keys=null
""", "data.input_key=question.content data.response_key=response", {}),
    "defaults and flat names of supervised training of OpenRLHF": ("openrlhf", "run.sh",
     "deepspeed --module openrlhf.cli.train_sft --dataset d --dataset_probs 1 --eval_dataset e --input_key question\n",
     "data.prompt_data=d data.prompt_data_probs='\"1\"' data.eval_data=e train.actor_learning_rate=5e-6 "
     "train.num_episodes=2 train.train_batch_size=128", {"module": "launcher"}),
    "defaults of PPO of TRL": ("trl", "ppo.py", "PPOTrainer(args=PPOConfig(output_dir='out'))",
     "rollout.generate_max_len=53 rollout.temperature=0.7 rollout.n_samples_per_prompt=1 algorithm.init_kl_coef=0.05 "
     "algorithm.use_kl_loss=false train.max_epochs=4 train.actor_learning_rate=3e-6 train.critic_learning_rate=3e-6 "
     "algorithm.advantages_norm=true rollout.rollout_batch_size=8 train.gradient_accumulation_steps=1 "
     "train.num_episodes=3", {"rollout_batch_size": "number of ranks"}),
    "the one optimizer of TRL's PPO": ("trl", "run.sh", """
accelerate launch --num_processes 2 examples/scripts/ppo/ppo.py --learning_rate 1e-5 --num_ppo_epochs 1 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 16
""", "train.actor_learning_rate=1e-5 train.critic_learning_rate=1e-5 train.max_epochs=1 "
     "rollout.rollout_batch_size=128 train.micro_train_batch_size=4", {"num_processes": ""}),
    "the label of OpenRLHF's sections is the reference": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --data.label_key answer --actor.policy_loss_type gspo\n",
     "data.reference_key=answer data.label_key=label algorithm.policy_loss=gspo "
     "algorithm.loss_agg_mode=seq-mean-token-mean", {}),
    "gspo of OpenRLHF's flat names averages over responses": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --policy_loss_type gspo --train_batch_size 128\n",
     "algorithm.policy_loss=gspo algorithm.loss_agg_mode=seq-mean-token-mean", {}),
    "correction of TRL's vLLM that its file leaves to it": ("trl", "t.py",
     "GRPOTrainer('m', args=GRPOConfig(use_vllm=True))",
     "algorithm.tis_mode=sequence algorithm.tis_mask=true algorithm.tis_cap=3",
     {"use_vllm": "", "rollout_batch_size": ""}),
    **{f"correction of TRL's vLLM by {mode}": ("trl", "run.sh",
     f"grpo.py --use_vllm --vllm_importance_sampling_mode {mode} --vllm_importance_sampling_{cap} 4",
     f"algorithm.tis_mode={kind} algorithm.tis_mask={mask} algorithm.tis_cap=4",
     {"use_vllm": "", "rollout_batch_size": ""}) for mode, cap, kind, mask in (
        ("token_truncate", "cap", "token", "false"), ("token_mask", "clip_max", "token", "true"),
        ("sequence_truncate", "clip_max", "sequence", "false"), ("sequence_mask", "cap", "sequence", "true"))},
    "a lower bound of TRL's vLLM": ("trl", "t.py", "GRPOTrainer('m', args=GRPOConfig(use_vllm=True, "
     "vllm_importance_sampling_correction=True, vllm_importance_sampling_clip_min=0.5))",
     "algorithm.tis_mode=sequence algorithm.tis_cap=3 algorithm.tis_floor=0.5",
     {"use_vllm": "", "rollout_batch_size": ""}),
    "correction that TRL turns off": ("trl", "run.sh", """
grpo.py --use_vllm true --vllm_importance_sampling_correction false --vllm_importance_sampling_mode token_mask
""", "algorithm.tis_mode='\"off\"' algorithm.tis_mask=false",
     {"use_vllm": "", "vllm_importance_sampling_mode": "does not count", "rollout_batch_size": ""}),
    "correction of TRL without vLLM": ("trl", "run.sh",
     "grpo.py --bf16 --vllm_importance_sampling_correction --vllm_importance_sampling_cap 2",
     "algorithm.tis_mode='\"off\"'",
     {"vllm_importance_sampling_cap": "use_vllm", "rollout_batch_size": ""}),
    "correction of verl": ("verl", "c.yaml",
     "algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: sequence, rollout_is_threshold: 3.0}}",
     "algorithm.tis_mode=sequence algorithm.tis_cap=3 algorithm.tis_mask=false", {}),
    "correction of verl that its bypass leaves out": ("verl", "c.yaml", """
algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: token, rollout_is_threshold: 3.0, bypass_mode: true}}
""", "algorithm.tis_mode='\"off\"'", {f"algorithm.rollout_correction.{name}": why for name, why in (
        ("bypass_mode", "nothing here"), ("rollout_is", "bypass_mode"), ("rollout_is_threshold", "bypass_mode"))}),
    "correction that verl leaves off": ("verl", "c.yaml",
     "algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0}}",
     "algorithm.tis_mode='\"off\"'", {"algorithm.rollout_correction.rollout_is": "not set"}),
    "kl_cov of verl": ("verl", "c.yaml", "{algorithm: {adv_estimator: grpo}, "
     "actor_rollout_ref: {actor: {policy_loss: {loss_mode: kl_cov}}}}",
     "algorithm.policy_loss=kl_cov algorithm.kl_cov_coef=0.1 algorithm.dual_clip=null", {}),
    "settings of verl's two losses by covariance": ("verl", "c.yaml", """
actor_rollout_ref: {actor: {policy_loss: {loss_mode: kl_cov, kl_cov_ratio: 0.02, ppo_kl_coef: 1.0,
    clip_cov_ratio: 0.0002, clip_cov_lb: 1.0}}}
""", "algorithm.kl_cov_coef=1 algorithm.cov_share=0.02",
     {f"actor_rollout_ref.actor.policy_loss.{name}": "loss_mode" for name in ("clip_cov_ratio", "clip_cov_lb")}),
    "a lower clip range of verl alone": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio_low=0.1
""", "algorithm.eps_clip=0.1 algorithm.eps_clip_high=0.2", {}),
    "a clip range of verl that its lower and upper one override": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio=0.1
""", "algorithm.eps_clip=0.2 algorithm.eps_clip_high=0.2", {"actor_rollout_ref.actor.clip_ratio": "clip_ratio_low"}),
    "a clip range of verl whose lower and upper one are taken away": ("verl", "c.yaml", """
{algorithm: {adv_estimator: grpo},
actor_rollout_ref: {actor: {clip_ratio: 0.1, clip_ratio_low: null, clip_ratio_high: null}}}
""", "algorithm.eps_clip=0.1 algorithm.eps_clip_high=0.1", {}),
    "the critic of EasyR1": ("easyr1", "c.yaml", "algorithm: {adv_estimator: gae}",
     "train.critic_learning_rate=1e-6 algorithm.eps_clip_high=0.3", {}),
    # 2 * 16 * 4 / 8 prompts
    "sizes and steps of TRL count what they count there": ("trl", "run.sh", """
accelerate launch --num_processes 4 grpo.py --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --num_generations 8 --steps_per_generation 16 --max_steps 100 --save_steps 10 --warmup_steps 10
""", "rollout.rollout_batch_size=16 rollout.n_samples_per_prompt=8 train.micro_train_batch_size=2 "
     "train.gradient_accumulation_steps=8 train.max_steps=50 output.save_steps=5 train.lr_warmup_ratio=0.1",
     {"num_processes": ""}),
    # 2 * 4 * 16 / 8 prompts
    "ranks of TRL on several hosts": ("trl", "run.sh",
     "torchrun --nnodes 2 --nproc_per_node 8 grpo.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
     "--num_generations 8\n", "rollout.rollout_batch_size=16", {"nnodes": "", "nproc_per_node": ""}),
    "ranks of TRL on a number of hosts that is the shell's": ("trl", "run.sh",
     "torchrun --nnodes $N --nproc_per_node 8 grpo.py --per_device_train_batch_size 8 --num_generations 8\n",
     "rollout.rollout_batch_size=1", {"nnodes": "", "nproc_per_node": "", "rollout_batch_size": "number of ranks"}),
    "a batch of TRL that holds no whole group": ("trl", "run.sh",
     "grpo.py --per_device_train_batch_size 1 --num_generations 8\n", "rollout.n_samples_per_prompt=8",
     {"rollout_batch_size": "1 samples of each rank"}),
    "loss and scale of TRL": ("trl", "t.py", """
args = GRPOConfig(loss_type="dr_grpo", scale_rewards=False, beta=0.0, top_k=0, lr_scheduler_type="constant")
GRPOTrainer("m", args=args, peft_config=LoraConfig(r=32))
""", "algorithm.loss_agg_mode=seq-mean-token-sum-norm algorithm.advantage_estimator=dr_grpo algorithm.init_kl_coef=0 "
     "rollout.top_k=-1 train.lr_scheduler=constant_with_warmup train.num_episodes=3 model.lora_rank=32 "
     "model.lora_alpha=8", {"target_modules": "q_proj", "rollout_batch_size": ""}),
    "cispo of TRL": ("trl", "t.py",
     "GRPOTrainer('m', args=GRPOConfig(loss_type='cispo', epsilon_high=5.0, importance_sampling_level='token'))",
     "algorithm.policy_loss=cispo algorithm.eps_clip=1 algorithm.eps_clip_high=4", None),
    "adapters of TRL": ("trl", "run.sh", "grpo.py --use_peft --lora_target_modules q_proj v_proj\n",
     "model.lora_rank=16 model.lora_alpha=32 model.lora_dropout=0.05", None),
    "adapters of TRL that are not asked for": ("trl", "run.sh", "grpo.py --lora_r 8 --bf16\n", "model.lora_rank=0",
     {"lora_rank": "use_peft", "rollout_batch_size": ""}),
    "RLOO of TRL": ("trl", "t.py", "RLOOTrainer('m', args=RLOOConfig(beta=0.1, num_iterations=2))",
     "algorithm.init_kl_coef=0.1 algorithm.use_kl_loss=false algorithm.loss_agg_mode=seq-mean-token-sum",
     {"loss": "whole responses", "rollout_batch_size": ""}),
    "settings of a shell variable whose first has no section": ("verl", "run.sh", """
MORE="engine=fsdp optim=fsdp optim.betas="[0.8,0.9]" optim.lr=2e-5"
python -m verl.trainer.fsdp_sft_trainer trainer.total_epochs=2 $MORE
""", "train.num_episodes=2 train.actor_learning_rate=2e-5 train.adam_betas=[0.8,0.9]",
     {"engine": "", "optim": ""}),
    **{f"URLs that share the samples of OpenRLHF, by {name}": ("openrlhf", "run.sh",
     f"python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --{name} http://a:1,http://b:1\n",
     "reward.remote_rm_url='http://a:1|http://b:1'", {}) for name in ("remote_rm_url", "reward.remote_url")},
    "rewards that OpenRLHF normalises by the reward model's numbers": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator rloo --reward.normalize_enable\n",
     "algorithm.reward_running_norm=false", {"reward.normalize_enable": "mean and deviation from the reward model"}),
    "a rollout of TRL for all ranks, whose number is unknown": ("trl", "run.sh", """
grpo.py --per_device_train_batch_size 2 --num_generations 8 --generation_batch_size 64 --max_steps 100 --save_steps 10
""", "rollout.rollout_batch_size=8 train.max_steps=100 output.save_steps=10",
     {"max_steps": "counts updates there", "save_steps": "32 of a rollout on one rank"}),
    # 64 / 2 / 4 = 8 updates of a rollout
    "a rollout of TRL for four ranks": ("trl", "run.sh", """
accelerate launch --num_processes 4 grpo.py --per_device_train_batch_size 2 --num_generations 8 \\
    --generation_batch_size 64 --max_steps 100
""", "rollout.rollout_batch_size=8 train.max_steps=12", {"num_processes": ""}),
    **{f"the critic of OpenRLHF starts from {start}": ("openrlhf", "run.sh",
     f"python3 -m openrlhf.cli.train_ppo_ray --pretrain m {more}\n",
     f"model.critic_pretrain={critic}", None) for start, more, critic in (
        ("the reward model", "--reward_pretrain r,s", "r"),
        ("its sections' reward model", "--reward.model_name_or_path r --algo.advantage.estimator gae", "r"),
        ("a model of its own", "--reward_pretrain r --critic_pretrain c", "c"),
        ("the actor beside a URL", "--reward_pretrain r --remote_rm_url http://a:1", "null"),
        ("nothing without gae", "--reward_pretrain r --advantage_estimator rloo", "null"))},
    "a budget of tokens that holds no whole sample": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 data.max_prompt_length=1024 data.max_response_length=8192
""", "rollout.generate_max_len=8192 rollout.prompt_max_len=1024 train.max_tokens_per_batch=0",
     {"max_tokens_per_batch": "9216 or more"}),
    "a budget of tokens of each rank that shares a sequence": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
""", "train.max_tokens_per_batch=8192 distributed.sp_size=2", {}),
    **{f"the mean that OpenRLHF takes off, by {name}": ("openrlhf", "run.sh",
     f"python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator reinforce --{name}\n",
     "algorithm.advantages_norm=false", {name: "mean of the batch"})
       for name in ("no_advantage_std_norm", "algo.advantage.no_std_norm")},
    "whole numbers of TRL with a point": ("trl", "c.yaml",
     "{num_generations: 8, num_train_epochs: 1.0, per_device_train_batch_size: 4.0, warmup_steps: 0.0}\n",
     "train.num_episodes=1 train.micro_train_batch_size=4 train.lr_warmup_ratio=0", None),
    "a value of TRL that is not understood": ("trl", "c.yaml", "{num_generations: 8, num_train_epochs: 0.5}\n",
     "train.num_episodes=1", {"num_train_epochs": "0.5", "kind": "", "rollout_batch_size": ""}),
    "a value of TRL that is computed": ("trl", "t.py", "GRPOTrainer('m', args=GRPOConfig(num_train_epochs=n))",
     "train.num_episodes=1", {"num_train_epochs": "computed", "rollout_batch_size": ""}),
    "betas of TRL": ("trl", "t.py", "GRPOTrainer('m', args=GRPOConfig(adam_beta2=0.99))",
     "train.adam_betas=[0.9,0.99]", {"rollout_batch_size": ""}),
    "a warm-up in steps of a run whose length is unknown": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
""", "train.lr_warmup_ratio=0.03", {"lr_warmup_ratio": "lr_warmup_steps there: 10"}),
    "a KL loss of verl whose gradient averages 0": ("verl", "run.sh", """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=kl
""", "algorithm.use_kl_loss=false algorithm.init_kl_coef=0.001", {"use_kl_loss": "--init_kl_coef 0"}),
    "a KL loss of OpenRLHF without a weight": ("openrlhf", "run.sh", """
python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --use_kl_loss --kl_estimator k3 --init_kl_coef 0
""", "algorithm.use_kl_loss=false algorithm.init_kl_coef=0", {"use_kl_loss": "needs a positive init_kl_coef"}),
    **{f"what {system} moves to the host": (system, "c.yaml", f"algorithm: {{adv_estimator: grpo}}\n{text}\n",
     "rollout.offload_trainer=true distributed.adam_offload=false", {}) for system, text in (
        ("verl", "actor_rollout_ref: {actor: {fsdp_config: {param_offload: true, optimizer_offload: true}}}"),
        ("easyr1", "worker: {actor: {offload: {offload_params: true, offload_optimizer: true}}}"))},
    "a part of verl's training that stays on the device": ("verl", "c.yaml", """
actor_rollout_ref: {actor: {fsdp_config: {param_offload: false, optimizer_offload: true}}}
""", "rollout.offload_trainer=true", {}),
    **{f"the split that OpenRLHF evaluates, {more or 'unset'}": ("openrlhf", "run.sh",
     f"python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --eval_dataset d {more}\n",
     f"data.eval_split={split}", {}) for more, split in (("", "train"), ("--eval_split dev", "dev"))},
    "no split to evaluate where OpenRLHF evaluates nothing": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo\n", "data.eval_split=test", {}),
    "defaults of verl's newer supervised training": ("verl", "run.sh", """
torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_files=d data.train_max_samples=9 trainer.seed=7
""", "train.lr_scheduler=constant_with_warmup train.lr_warmup_ratio=0 train.adam_betas=[0.9,0.999] train.seed=7 "
     "data.max_samples=9 train.actor_learning_rate=1e-3 train.train_batch_size=256 train.num_episodes=4",
     {"nproc_per_node": ""}),
    **{f"modules without LoRA in {name}": (system, "run.sh",
     f"python3 -m verl.trainer.main algorithm.adv_estimator=grpo {rank} {name}='{value}'\n",
     f"model.freeze_prefix='{frozen}'", told) for system, name, rank, value, frozen, told in (
        ("verl", "actor_rollout_ref.model.exclude_modules", "actor_rollout_ref.model.lora_rank=8", ".*visual.*",
         '"true"', {}),
        ("easyr1", "worker.actor.model.lora.exclude_modules", "worker.actor.model.lora.rank=8", ".*visual.*",
         '"true"', {}),
        ("easyr1", "worker.actor.model.lora.exclude_modules", "worker.actor.model.lora.rank=0", ".*visual.*",
         '""', {"worker.actor.model.lora.exclude_modules": "without a rank of LoRA"}),
        ("verl", "actor_rollout_ref.model.exclude_modules", "actor_rollout_ref.model.lora_rank=9", ".*q_proj",
         '""', {"actor_rollout_ref.model.exclude_modules": "--target_modules"}))},
    "the entropy that TRL holds": ("trl", "t.py",
     "GRPOTrainer('m', args=GRPOConfig(use_adaptive_entropy=True, entropy_coef_delta=0.01))",
     "algorithm.entropy_target=0.2 algorithm.entropy_coef_step=0.01 algorithm.entropy_coef_max=1",
     {"rollout_batch_size": ""}),
    "an entropy that TRL does not hold": ("trl", "t.py", "GRPOTrainer('m', args=GRPOConfig(entropy_target=0.5))",
     "algorithm.entropy_target=null", {"entropy_target": "use_adaptive_entropy", "rollout_batch_size": ""}),
    "a length of everything without one of responses": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --data.max_len 4096\n",
     "data.apply_chat_template=false", {"data.max_len": "what its prompt leaves of 4096"}),
    "vespo of TRL, which corrects what vLLM samples itself": ("trl", "t.py",
     "GRPOTrainer('m', args=GRPOConfig(use_vllm=True, loss_type='vespo', "
     "vllm_importance_sampling_mode='token_truncate'))", "algorithm.policy_loss=vespo algorithm.tis_mode=\"'off'\"",
     {"use_vllm": "", "tis_mode": "vespo compares", "tis_cap": "", "rollout_batch_size": ""}),
    "EasyR1 that does not filter long prompts, and ends at one": ("easyr1", "run.sh",
     "python3 -m verl.trainer.main data.filter_overlong_prompts=false\n", "data.on_long_prompt=error", {}),
    **{f"{loss} of verl, which has no dual clip": ("verl", "run.sh",
     f"python3 -m verl.x actor_rollout_ref.actor.policy_loss.loss_mode={loss} algorithm.adv_estimator=grpo {also}\n",
     "algorithm.dual_clip=null", told) for loss, also, told in (
        ("clip_cov", "", {}),
        ("gspo", "actor_rollout_ref.actor.clip_ratio_c=4.0",
         {"actor_rollout_ref.actor.clip_ratio_c": "no dual clip"}))},
    "gspo of EasyR1, which has a dual clip": ("easyr1", "run.sh",
     "python3 -m verl.trainer.main worker.actor.loss_type=gspo\n", "algorithm.dual_clip=3", {}),
    "splits behind local paths of EasyR1": ("easyr1", "run.sh",
     "python3 -m verl.trainer.main data.train_files=/data/geo@train data.val_files=./geo@test\n",
     "data.prompt_data=/data/geo data.prompt_split=train data.eval_data=./geo data.eval_split=test", {}),
    **{f"weights of verl's {loss} without log-probs of the trainer": ("verl", "run.sh",
     "python3 -m verl.x algorithm.adv_estimator=grpo algorithm.rollout_correction.bypass_mode=True "
     f"algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.loss_type={loss}\n",
     f"algorithm.tis_mode={mode}", {
        "algorithm.rollout_correction.bypass_mode": "", "algorithm.rollout_correction.loss_type": "--policy_loss ppo",
        **told}) for loss, mode, told in (
            ("reinforce", "token", {}),
            ("ppo_clip", "\"'off'\"", {"algorithm.rollout_correction.rollout_is": "weighs nothing there"}))},
    "no limits of EasyR1": ("easyr1", "run.sh", "python3 -m verl.trainer.main trainer.save_limit=-1 "
     "algorithm.online_filtering=true trainer.max_try_make_batch=-1\n", "rollout.dynamic_sampling=true",
     {"trainer.save_limit": "--max_ckpt_num N", "trainer.max_try_make_batch": "--dynamic_sampling_max_tries N"}),
    "no limits of verl": ("verl", "run.sh", "python3 -m verl.x algorithm.adv_estimator=grpo "
     "trainer.max_actor_ckpt_to_keep=-1 algorithm.filter_groups.max_num_gen_batches=0 actor_rollout_ref.rollout.n=4\n",
     "output.max_ckpt_num=3", {
         "trainer.max_actor_ckpt_to_keep": "--max_ckpt_num N", "algorithm.filter_groups.max_num_gen_batches": ""}),
    "two values that the whole refuses": ("trl", "c.yaml", "save_total_limit: -1\nnum_iterations: 0\n",
     "output.max_ckpt_num=3 train.max_epochs=1", {
         "max_ckpt_num": "max_ckpt_num is -1; it must be positive", "max_epochs": "max_epochs is 0", "kind": "",
         "rollout_batch_size": ""}),
    "a default of verl that its estimator has no use for": ("verl", "run.sh",
     "python3 -m verl.x algorithm.adv_estimator=grpo x.y=1\n", "rollout.n_samples_per_prompt=8",
     {"x.y": "", "n_samples_per_prompt": "n_samples_per_prompt is 1, it must be at least 2"}),
    **{f"a KL loss of verl by {form}": ("verl", "run.sh",
     "python3 -m verl.x algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
     f"actor_rollout_ref.actor.kl_loss_type={form}\n",
     f"algorithm.use_kl_loss=true algorithm.kl_estimator={here} algorithm.init_kl_coef=0.001", told)
     for form, here, told in (
        ("abs", "k3", {"actor_rollout_ref.actor.kl_loss_type": "'abs'", "kl_estimator": "k3 stands in"}),
        ("low_var_kl+", "k2", {}))},
    **{f"a cosine of verl that ends at {end}": ("verl", "run.sh", f"python3 -m verl.trainer.sft_trainer {text}\n",
     "train.lr_scheduler=cosine_with_min_lr train.packing_samples=true", told) for end, text, told in (
        ("a tenth", "optim.warmup_style=cosine optim.min_lr_ratio=0.1 use_remove_padding=True", {}),
        ("a half", "optim.lr_decay_style=cosine optim.min_lr_ratio=0.5 use_remove_padding=True engine.strategy=fsdp2",
         {"engine.strategy": "--zero_stage", "lr_scheduler": "ends at 0.5 of the"}))},
    "episodes of VAGEN": ("verl", "run.sh", "python3 -m vagen.trainer.main_ppo algorithm.adv_estimator=grpo "
     "rollout_manager.n_trajectory=4 actor_rollout_ref.rollout.n=1 rollout_manager.max_turns=3 "
     "data.max_trajectory_length=99\n", "rollout.n_samples_per_prompt=4", {
         "rollout_manager.max_turns": "--max_turns N", "data.max_trajectory_length": "--max_episode_tokens N"}),
    "episodes of verl-agent": ("verl", "run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
     "env.rollout.n=4 env.env_name=Sokoban env.max_steps=15\n", "rollout.n_samples_per_prompt=4", {
         "env.env_name": "--environment FILE.py:CLASS", "env.max_steps": "--max_turns N"}),
    "files of VLM-R1 and its vision tower": ("trl", "run.sh", "python grpo_jsonl.py --data_file_paths a.jsonl:b.jsonl "
     "--image_folders img:img --freeze_vision_modules true --beta 0\n", "model.freeze_prefix=\"'true'\"", {
         "data_file_paths": "--prompt_data PATH,PATH", "image_folders": "--image_root FOLDER",
         "rollout_batch_size": ""}),
    "a reference of OpenRLHF on the host, and IcePop": ("openrlhf", "run.sh",
     "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator rloo --ref.offload --algo.kl.init_coef 0.1 "
     "--algo.advantage.is_correction_type icepop --generate_max_len 8\n", "rollout.offload_reference=true",
     {"algo.advantage.is_correction_type": "--tis_mask true --tis_floor 0.5"}),
    **{f"PPO of TRL on {ranks}": ("trl", "run.sh", f"""
{launcher} ppo_tldr.py --model_name_or_path org/base --sft_model_path org/sft --reward_model_path org/rm \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --total_episodes 10000
""", "model.pretrain=org/sft reward.reward_pretrain=org/rm model.critic_pretrain=org/rm "
     f"train.max_steps={steps}", told) for ranks, launcher, steps, told in (
        ("one rank", "python", 313, {"rollout_batch_size": "", "max_steps": "10000 samples on one rank"}),
        ("two ranks", "accelerate launch --num_processes 2", 157, {"num_processes": ""}))},
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
def test_file_of_another_system_becomes_the_settings_that_it_means(converted, case):
    system, name, text, held, left_out = MEANINGS[case]
    found = converted(system, name, text)
    config = OmegaConf.create(asdict(settings(found)))
    wanted = {path: yaml.safe_load(value) for path, value in (each.split("=", 1) for each in shlex.split(held))}
    for path, value in wanted.items():
        held_value = OmegaConf.select(config, path)
        assert held_value == (float(value) if isinstance(held_value, float) else value), path
    if left_out is not None:
        usual = {"reward_fn", "prompt_data", "n_samples_per_prompt"}  # scripts here are short
        told = [name for name in found.left_out if name in left_out or name not in usual]
        assert told == list(left_out)
        assert all(word in found.left_out[key] for key, word in left_out.items())


@pytest.mark.parametrize(
    ("system", "text", "said"),
    [
        ("verl", "python3 -m verl.trainer.main_ppo data.train_files=d", {"reward_fn": "default_compute_score"}),
        ("verl", "python3 -m verl.trainer.main_ppo data.train_files=d custom_reward_function.path=r.py", {}),
        (
            "verl",
            "python3 -m verl.trainer.main_ppo data.train_files=d "
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml",
            {"reward_fn": "default_compute_score"},
        ),
        ("verl", "python3 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64", {"prompt_data": "--prompt_data"}),
        ("trl", "grpo.py --bf16", {"reward_fn": "--reward_fn path.py:function", "prompt_data": "built-in"}),
        ("trl", "grpo.py --dataset_name d --reward_model_name_or_path r", {}),
        ("openrlhf", "python3 -m openrlhf.cli.train_ppo_ray --prompt_data d --agent_func_path a.py", {}),
    ],
)
def test_file_without_a_reward_or_data_is_said_to_have_none(converted, system, text, said):
    told = converted(system, "run.sh", text + "\n").left_out
    assert {"reward_fn", "prompt_data"} & told.keys() == said.keys()
    assert all(word in told[name] for name, word in said.items())


def test_template_of_easyr1_is_told_where_its_words_go(converted):
    for name, text in (("c.yaml", "data: {format_prompt: math.jinja}"), ("c.sh", "python main data.format_prompt=m")):
        told = converted("easyr1", name, text).left_out["data.format_prompt"]
        assert "prompts of the data" in told and "--system_prompt TEXT" in told and "--data_format geometry3k" in told


def test_verl_script_variables_are_put_in_and_others_stay(converted):
    text = """
MODEL=Qwen/Qwen2.5-VL-7B-Instruct
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=512 trainer.n_gpus_per_node=8 \\
    actor_rollout_ref.model.path=$MODEL data.train_files=$HOME/train.parquet
"""
    found = converted("verl", "run.sh", text)
    assert '--prompt_data "$HOME/train.parquet"' in found.command
    config = settings(found)
    assert config.model.pretrain == "Qwen/Qwen2.5-VL-7B-Instruct" and config.rollout.rollout_batch_size == 512
    assert config.algorithm.advantage_estimator == "group_norm"
    assert list(found.left_out) == ["trainer.n_gpus_per_node", "n_samples_per_prompt", "reward_fn"]


def test_branches_of_a_script_are_not_followed_and_that_is_said(converted):
    text = (
        "if [ $A = x ]; then\n  LR=5e-6; N=16\nelse\n  LR=2e-6\nfi\ntrl grpo --learning_rate $LR --num_generations $N\n"
    )
    found = converted("trl", "run.sh", text)
    assert settings(found).train.actor_learning_rate == 2e-6 and settings(found).rollout.n_samples_per_prompt == 16
    assert "the last value stands" in found.left_out["branches"]
    text = "N=16\nif [ $D = 1 ]; then\n  N=2\nfi\ntrl grpo --beta 0\n"
    assert "branches" in converted("trl", "run.slurm", text).left_out
    assert "branches" not in converted("trl", "run.sh", "trl grpo --learning_rate 1e-6\n").left_out


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


def words_in_bash(command, folder):
    """The command's words, as bash reads them in a script of this folder."""
    (folder / "converted.sh").write_text("lightrft-visual() { printf '%s\\n' \"$@\"; }\n" + command)
    script = [str(folder / "converted.sh")]
    return subprocess.run(["bash", *script], cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()


def test_output_of_commands_stays_for_the_shell(converted, tmp_path):
    text = """
STAMP=$(date -d @0 -u "+%F %T")
HERE="$(dirname "$0")"
python3 -m verl.trainer.main_ppo data.train_files=`pwd`/a.parquet \\
    trainer.default_local_dir=out/$STAMP/$(echo 7) trainer.experiment_name="run $(printf 'a  b')" \\
    actor_rollout_ref.model.path=$HERE/model actor_rollout_ref.rollout.n=4 \\
    critic.model.path=${CRITIC:-$(pwd)/of_$(echo "a b")} algorithm.adv_estimator=gae
"""
    words = words_in_bash(converted("verl", "run.sh", text).command, tmp_path)
    assert f"{tmp_path}/a.parquet" in words and "out/1970-01-01 00:00:00/7" in words
    assert f"{tmp_path}/of_a b" in words
    assert "run a  b" in words and f"{tmp_path}/model" in words
    assert words[words.index("--n_samples_per_prompt") + 1] == "4"


def test_quotes_inside_commands_stay_as_the_script_has_them(converted, tmp_path):
    text = r"""
ROOT="$( cd "$( dirname "${BASH_SOURCE[0]}" )/.." && pwd )"
HERE=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
grpo.py --num_generations 8 --output_dir ${ROOT}/out --run_name $(basename "$0" .sh | sed "s/\.*ed$/ \"it's\"/") \
    --model_name_or_path "$HERE/my \"model\""
"""
    folder = tmp_path / "a folder"
    folder.mkdir()
    words = words_in_bash(converted("trl", "run.sh", text).command, folder)
    wanted = {"output_dir": f"{tmp_path}/out", "run_name": 'convert "it\'s"', "pretrain": f'{folder}/my "model"'}
    assert {name: words[words.index(f"--{name}") + 1] for name in wanted} == wanted


def test_script_whose_variables_name_themselves_ends(converted):
    found = converted("trl", "run.sh", "A=$A/x\nB=$B$B$A\nx.py --output_dir $B --seed $((1/0))\n")
    assert '--output_dir "$B$B$A/x"' in found.command and "seed" in found.left_out


def test_several_files_of_a_shell_script_are_one_list_with_commas(converted):
    found = converted("verl", "run.sh", """python3 -m verl.x data.train_files="['$HOME/a.parquet', 'b.parquet']"\n""")
    assert '--prompt_data "$HOME/a.parquet,b.parquet"' in found.command


def test_text_of_a_file_that_is_no_shell_script_is_quoted_whole(converted):
    text = 'system_prompt: "say $5, \'x\' and \\"y\\""\nnum_generations: 8\n'
    assert settings(converted("trl", "c.yaml", text)).data.system_prompt == "say $5, 'x' and \"y\""


@pytest.mark.parametrize("name", ["prose.sh", "list.yaml", "empty.py"])
def test_file_without_settings_or_of_another_kind_is_a_config_error(converted, name):
    with pytest.raises(ConfigError, match="train.py cannot be read"):
        converted("trl", "train.py", "def (")
    with pytest.raises(ConfigError, match=f"{name} holds no settings"):
        converted("trl", name, {"prose.sh": "only words\n", "list.yaml": "[1, 2]\n", "empty.py": ""}[name])


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
        ("trl", "accelerate launch --num_processes 8 examples/scripts/sft_vlm.py --bf16", "sft"),
        ("trl", "python3 -u trl/scripts/sft.py --bf16 --dataset_name grpo_rows.py", "sft"),
        ("trl", "python make_rows_sft.py && accelerate launch $HERE/rloo_vlm.py --bf16 --max_grad_norm 1", "rloo"),
        ("trl", "python examples/scripts/ppo/ppo_tldr.py --bf16", "ppo"),
        ("trl", "python grpo_with_reward.py --bf16", "grpo"),
        ("trl", "trl vllm-serve --model m &\npython sft.py --bf16 --output_dir o", "sft"),
    ],
)
def test_command_trains_by_what_the_file_trains_by(converted, system, text, verb):
    found = converted(system, "train.py" if text.endswith(")") else "run.sh", text)
    assert found.command.split()[2] == verb
    assert "kind" not in found.left_out
    settings(found)


@pytest.mark.parametrize("name, text", [("c.yaml", "num_generations: 8"), ("run.sh", "python norm.py --bf16")])
def test_file_of_trl_that_names_no_kind_is_said_to_be_taken_for_grpo(converted, name, text):
    found = converted("trl", name, text)
    assert found.command.split()[2] == "grpo" and "grpo is assumed" in found.left_out["kind"]


@pytest.mark.parametrize(
    "system, text", [("trl", "python train_gold_answers.py --num_generations 8"),
                     ("verl", "python3 train_distillation_math.py algorithm.adv_estimator=grpo x.y=1")],
)  # fmt: skip
def test_words_of_a_programs_name_may_be_of_anything(converted, system, text):
    assert converted(system, "run.sh", text).command.split()[2] == "grpo"


@pytest.mark.parametrize(
    "system, name, text", [("trl", "t.py", "DPOTrainer(model='m', args=DPOConfig(beta=0.1))"),
                           ("trl", "run.sh", "accelerate launch examples/scripts/dpo_vlm.py --beta 0.1"),
                           ("trl", "run.sh", "python trl/scripts/kto.py --beta 0.1"),
                           ("trl", "run.sh", "python nash_md.py --beta 0.1"),
                           ("trl", "run.sh", "python reward_modeling.py --bf16"),
                           ("openrlhf", "run.sh", "python3 -m openrlhf.cli.train_rm --pretrain m")],
)  # fmt: skip
def test_training_without_a_counterpart_is_refused_by_name(converted, system, name, text):
    with pytest.raises(
        ConfigError, match=r"trains by (dpo|kto|nash|reward|rm), which .* there are grpo, rloo, ppo, sft"
    ):
        converted(system, name, text)


def test_verl_defaults_that_are_others_here_stand_in_the_command(converted):
    found = converted("verl", "run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo x.y=1\n")
    config = settings(found)
    train = config.train
    assert (train.lr_scheduler, train.lr_warmup_ratio, train.l2) == ("constant_with_warmup", 0, 0.01)
    assert (list(config.train.adam_betas), config.train.num_episodes) == ([0.9, 0.999], 30)
    assert (config.rollout.rollout_batch_size, config.train.groups_per_update) == (1024, 256)
    assert (config.algorithm.init_kl_coef, config.algorithm.dual_clip) == (0, 3.0)
    assert {"lr_scheduler", "dual_clip"} <= {*found.unset} and "value_clip" not in found.unset  # of a critic


def test_easyr1_defaults_and_the_file_that_a_script_names(converted, tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text("worker: {rollout: {n: 5}, actor: {max_grad_norm: 0.5}}\n")
    text = "python3 -m verl.trainer.main config=examples/config.yaml worker.actor.model.lora.rank=64\n"
    config = settings(converted("easyr1", "examples/run.sh", text))
    assert (config.rollout.n_samples_per_prompt, config.train.max_norm, config.model.lora_rank) == (5, 0.5, 64)
    assert (config.algorithm.eps_clip, config.algorithm.eps_clip_high, config.algorithm.dual_clip) == (0.2, 0.3, 3.0)
    assert (config.algorithm.init_kl_coef, config.algorithm.use_kl_loss) == (0.001, False)
    found = converted("easyr1", "run.sh", "python3 -m verl.trainer.main config=gone.yaml trainer.total_epochs=2\n")
    assert settings(found).train.num_episodes == 2
    assert not found.unset and "convert it as well" in found.left_out["config"]
    assert "kl" not in found.command  # which that file may set


@pytest.mark.parametrize("given", ['{"n":16,"temperature":1.0}', "{n:16,temperature:1.0}"])
def test_mapping_on_the_command_line_is_the_settings_in_it(converted, tmp_path, given):
    (tmp_path / "config.yaml").write_text("worker: {rollout: {val_override_config: {n: 1, top_p: 1.0}}}\n")
    text = f"""python3 -m verl.trainer.main config=config.yaml algorithm.adv_estimator=grpo \\
    worker.rollout.val_override_config='{given}' \\
    worker.reward.reward_function_kwargs='{{"format_weight": 0.5}}' trainer.experiment_name='{{a}}'
"""
    found = converted("easyr1", "run.sh", text)
    config = settings(found)
    assert (config.output.eval_samples_per_prompt, config.output.run_name) == (16, "{a}")
    assert "--reward_recipe" in found.left_out["worker.reward.reward_function_kwargs.format_weight"]


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
