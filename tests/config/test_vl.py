"""Settings that contradict each other, or that one without the other would do nothing, are refused by name."""

import pytest

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.idle import check_run
from lightrft_visual.config.load import load_config
from lightrft_visual.config.sft import SFTRunConfig
from lightrft_visual.config.vl import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from lightrft_visual.errors import ConfigError


def load(text: str) -> RunConfig:
    return load_config(RunConfig, text.split(), preset=None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--overlong_buffer", "overlong_buffer_len 1024 must be less than generate_max_len 1024"),
        ("--max_tokens_per_batch 4096", "add --packing_samples"),
        ("--packing_samples --max_tokens_per_batch -5", "positive budget"),
        (
            "--packing_samples --max_tokens_per_batch 1000",
            r"prompt_max_len 1024 \(the default\) \+ generate_max_len 1024 \(the default\); set it to 2048",
        ),
        (
            "--no_apply_chat_template --system_prompt Think.",
            "^system_prompt does nothing with apply_chat_template false",
        ),
        ("--no_apply_chat_template --chat_template_kwargs.thinks true", "^chat_template_kwargs does nothing with"),
        ("--answer_loss_weight 0 --drawing_loss_weight 0", "are both 0: nothing would be trained"),
        ("--critic_pretrain somewhere", "critic_pretrain.*gae"),
        ("--engine_quantization fp8", "add --tis_mode token"),
        (
            "--engine_type hf --engine_quantization fp8 --tis_mode token",
            "engine_quantization belongs to engines with weights of their own",
        ),
        ("--engine_type hf --engine_kv_cache_dtype fp8", "engine_kv_cache_dtype belongs to engines with weights"),
        (
            "--engine_type hf --engine_kwargs.block_size 32",
            "engine_kwargs belongs to engines with weights of their own",
        ),
        ("--tis_mode token --tis_mask --tis_floor 2.5", "not below tis_cap 2.0"),
        ("--sapo_tau_neg 2", "sapo_tau_neg belongs to policy_loss sapo; here 2.0 would do nothing: leave it out"),
        ("--noisy_rollout_strength 3", "belongs to a noisy_rollout_share"),
        ("--init_kl_coef 0 --kl_target 0.1", "kl_target steers"),
        ("--eval_ema", "add --enable_ema"),
        *((f"--best_metric {name}", "NAME, max:NAME or min:NAME") for name in ("most:eval_reward", "max:", ":a")),
        *(
            (f"--best_metric a --eval_steps {evaluate} --save_steps {save}", "multiple of eval_steps")
            for evaluate, save in ((-1, 4), (2, -1), (4, 2), (2, 3))
        ),
        ("--offload_trainer --zero_stage 0", "offload_trainer moves the states of ZeRO 1 to 3"),
        ("--bf16 --grad_accum_dtype fp32 --zero_stage 0", "grad_accum_dtype: ZeRO stage 0"),
        ("--placement split async.max_staleness=1 --enable_ema", "add --eval_ema false"),
        ("--offload_reference --init_kl_coef 0", "offload_reference moves a whole reference model"),
        ("--guard.policy rollback", "name a judge by --gold_recipe or --gold_fn"),
        ("--guard.policy rollback --prompt_data a.jsonl --gold_fn a.py:f", "name held-out prompts by --eval_data"),
        ("--guard.watch false --guard.policy stop", "needs guard.watch"),
        ("--guard.policy rollback --guard.keep_best false", "keep_best"),
        ("--gold_fn a.py:f --gold_recipe b.yaml", "not both"),
        ("--best_metric eval_reward --max_eval_samples 0", "best_metric compares evaluations, and there are no"),
        ("--gold_fn a.py:f --guard.watch false --max_eval_samples 0", "gold has nothing to score"),
        ("--gold_fn a.py:f --gold_every 0 --max_eval_samples 0", "gold has nothing to score: no rollouts .gold_every"),
        ("--policy_loss luspo", "made by --loss_agg_mode seq-mean-token-sum"),
        ("--policy_loss dppo_tv --tis_mode token", "compares with the engine's log-probs itself"),
        ("--policy_loss vespo --top_p 0.9", "top_p 1"),
        ("--policy_loss clip_cov --clip_cov_low 6", "not below clip_cov_high"),
        ("--entropy_target 0.5 --entropy_coef 0.1", "cannot start at 0.1"),
        ("--advantage_estimator reinforce --share_prefix true --n_samples_per_prompt 1", "share_prefix need n_samples"),
        ("--init_kl_coef 0 --ref_update_steps 2", "ref_update_steps needs a KL"),
        ("--init_kl_coef 0.1 --ref_update_steps 2 --lora_rank 4", "with LoRA the reference"),
        ("--target_parameters experts.down_proj --lora_rank 4 --lora_dropout 0.1", "target_parameters needs"),
        ("--teacher_coef 1", "give both, or none"),
        ("--selective_replay 64 --advantage_estimator reinforce", "selective_replay replaces samples of groups"),
        ("--compile true --zero_stage 3", "zero_stage 0 to 2"),
        ("--sp_size 2 --gradient_accumulation_steps 2", "set train_batch_size"),
        ("--sp_size 0", "sp_size"),
        ("--noisy_rollout_share 0.05 --n_samples_per_prompt 8", "noisy_rollout_share"),
        ("--placement split async.max_staleness=1 --noisy_rollout_share 0.5", "ahead, and noisy_rollout_share cannot"),
        ("--advantage_estimator distillation", "distillation learns from a teacher alone"),
        (
            "--teacher_pretrain m --teacher_coef 1 --advantage_estimator distillation --dynamic_sampling true",
            "which a teacher teaches as well",
        ),
        ("--compile true --use_liger_kernel true", "compile and use_liger_kernel .* leave one out"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        load(flags)


def test_an_average_that_is_kept_is_evaluated_and_exported():
    assert load("").output.eval_ema is False
    assert load("--enable_ema").output.eval_ema is True
    assert load("--enable_ema --no_eval_ema").output.eval_ema is False


def sizes(flags: str) -> tuple[int, int]:
    """Samples of an update and updates of a step, without the embedded model's recipe."""
    config = load_config(RunConfig, f"--pretrain model --prompt_data a.jsonl --reward_fn a.py:f {flags}".split())
    return config.train.train_batch_size, config.updates(1)


@pytest.mark.parametrize(
    ("flags", "expected", "told"),
    [
        ("", (1024, 1), []),
        ("--rollout_batch_size 3 --n_samples_per_prompt 5", (15, 1), []),
        ("--rollout_batch_size 3 --n_samples_per_prompt 5 --train_batch_size 0", (15, 1), []),
        ("--rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 8", (8, 2), []),
        (
            "--rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 128", (16, 1),
            ["train_batch_size 128 is more than the 16 samples of a rollout: an update takes all of them"],
        ),
        (
            "--rollout_batch_size 4 --n_samples_per_prompt 4 --groups_per_update 5", (16, 1),
            ["train_batch_size 20 is more than the 16 samples of a rollout: an update takes all of them"],
        ),
    ],
)  # fmt: skip
def test_an_update_takes_the_whole_rollout_unless_something_smaller_is_asked_for(flags, expected, told, caplog):
    assert sizes(flags) == expected and [record.getMessage() for record in caplog.records] == told


def test_small_rollouts_of_the_embedded_model_are_one_update_without_a_line_about_a_size_that_nobody_gave(caplog):
    config = load_config(RunConfig, "--rollout_batch_size 2 --n_samples_per_prompt 8".split())
    assert config.train.train_batch_size == 16 and not caplog.records


def test_updates_that_do_not_divide_a_rollout_are_refused_with_numbers_that_work():
    told = (
        r"rollout_batch_size 128 \(the default\) \* n_samples_per_prompt 5 = 640 samples do not divide into updates of "
        r"train_batch_size 300; use 160 or 320, or 0 for the whole rollout \(.*n_samples_per_prompt: command line"
    )
    with pytest.raises(ConfigError, match=told):
        sizes("--n_samples_per_prompt 5 --train_batch_size 300")


def test_updates_given_in_prompts_that_do_not_divide_a_rollout_are_refused_in_prompts():
    told = "rollout_batch_size 6 does not divide into groups_per_update 4; use 3 or 6"
    with pytest.raises(ConfigError, match=told):
        sizes("--rollout_batch_size 6 --n_samples_per_prompt 3 --groups_per_update 4")


def test_gradient_type_of_a_supervised_run_is_checked_as_that_of_others():
    flags = "--bf16 --grad_accum_dtype fp32 --zero_stage 0"
    with pytest.raises(ConfigError, match="grad_accum_dtype: ZeRO stage 0"):
        load_config(SFTRunConfig, flags.split(), preset=None)


def test_a_budget_of_a_supervised_run_may_be_below_the_limits_of_rows():
    flags = "--packing_samples --max_tokens_per_batch 100"
    assert load_config(SFTRunConfig, flags.split(), preset=None).train.max_tokens_per_batch == 100


def test_best_metric_of_a_supervised_run_needs_held_out_rows():
    rows = ["--prompt_data", "a.jsonl", "--best_metric", "eval_loss"]
    with pytest.raises(ConfigError, match="best_metric compares evaluations"):
        load_config(SFTRunConfig, rows, preset=None)
    load_config(SFTRunConfig, [*rows, "--eval_data", "b.jsonl"], preset=None)


def test_gold_is_asked_with_the_limits_the_token_and_the_failure_policy_of_the_rewards_and_by_what_it_names_alone():
    words = "--prompt_data a.jsonl --reward_fn a.py:f --gold_recipe {'*':[[remote,http://h/j,1.0]]}"
    limits = "--reward_token_env TOKEN --reward_timeout 9 --reward_retries 1 --no_reward_probe --reward_wire openrlhf"
    gold = load(f"{words} {limits} --reward_max_invalid 0.9 --on_reward_error skip").gold
    assert (gold.reward_token_env, gold.reward_timeout, gold.reward_retries) == ("TOKEN", 9, 1)
    assert (gold.reward_max_invalid, gold.on_reward_error, gold.reward_probe) == (0.9, "skip", False)
    assert (gold.reward_fn, gold.reward_wire) == (None, "auto")
    gold = load("--gold_fn a.py:f --reward_fn b.py:g").gold
    assert (gold.reward_fn, gold.reward_recipe) == ("a.py:f", None)
    assert load("--prompt_data a.jsonl --reward_fn a.py:f").gold is None


def test_what_belongs_together_is_accepted():
    load("--overlong_buffer --overlong_buffer_len 128")
    load("--policy_loss sapo --sapo_tau_neg 2 --papo_coef 0.01 --papo_mask_ratio 0.5 --tis_mode token --tis_cap 3")
    load("--packing_samples --max_tokens_per_batch 2048")
    load("--noisy_rollout_share 0.5 --n_samples_per_prompt 8 --selective_replay 64")
    load("--guard.policy rollback --reward_fn a.py:f")  # the embedded questions' exact answers are gold beside it
    load("--guard.policy rollback --prompt_data embedded_reasoning")
    load("--guard.policy rollback --prompt_data a.jsonl --eval_data b.jsonl --gold_fn a.py:f")
    load("--advantage_estimator gae --critic_pretrain somewhere --tis_mode token --tis_mask")


def test_defaults_of_lightrft_that_are_typed_out_mean_what_they_mean_there():
    found = load("--high_entropy_token_ratio 0.0 --critic_pretrain= --reward_pretrain=")
    assert found.algorithm.high_entropy_token_ratio == 1.0 and found.model.critic_pretrain is None


@pytest.mark.parametrize(
    ("flags", "rate", "warmup"),
    [
        ("", 5e-4, 0.0),
        ("--train_batch_size 128", 2.5e-4, 0.05),  # also the schema's default, which is not that of the preset
        ("--groups_per_update 8", 2.5e-4, 0.05),
        ("--max_epochs 2 --actor_learning_rate 1e-3", 1e-3, 0.05),
        ("--train_batch_size 0", 5e-4, 0.0),
    ],
)
def test_several_updates_of_the_embedded_task_take_smaller_steps(flags, rate, warmup):
    train = load_config(RunConfig, flags.split()).train
    assert (train.actor_learning_rate, train.lr_warmup_ratio) == (rate, warmup)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lambd": 0.9}, ["lambd 0.9: read by advantage_estimator gae, and does nothing here"]),
        ({"lambd": 1.0, "value_clip": 0.5, "advantage_estimator": "rloo"},
         ["lambd 1 and value_clip 0.5: read by advantage_estimator gae, and does nothing here"]),
        ({"lambd": 0.9, "value_clip": 0.5, "advantage_estimator": "gae"}, []),
        ({"policy_loss": "sapo", "eps_clip": 0.1, "eps_clip_high": 0.3},
         ["eps_clip 0.1 and eps_clip_high 0.3: read by policy losses that clip ratios, and does nothing here"]),
        ({"policy_loss": "cispo", "eps_clip": 0.1}, []),
    ],
)  # fmt: skip
def test_settings_of_a_critic_and_of_clips_are_said_to_do_nothing_without_one(settings, told, caplog):
    check_run(AlgorithmConfig(**settings), RolloutConfig())
    assert [each.message for each in caplog.records] == told


@pytest.mark.parametrize("schema", [RunConfig, SFTRunConfig, DiffusionRunConfig])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--pretrain m --prompt_data d.jsonl --eval_steps 5 --eval_split dev",  # saves as often
         ["eval_split dev: read by evaluations, whose prompts --eval_data names, and does nothing here"]),
        ("--pretrain m --prompt_data d.jsonl --eval_steps 5 --eval_split dev --save_steps 9",
         ["eval_split dev: read by evaluations, whose prompts --eval_data names, and does nothing here",
          "eval_steps 5: read by evaluations, whose prompts --eval_data names, and does nothing here"]),
        ("--pretrain m --prompt_data d.jsonl --eval_steps 5 --eval_data e.jsonl", []),
        ("--pretrain m --prompt_data d.jsonl --eval_steps 5 --max_eval_samples 0", []),
        ("--pretrain m --prompt_data d.jsonl --eval_steps -1", []),
        ("--pretrain m --eval_steps 5", []),
        ("--prompt_data d.jsonl --eval_steps 5", []),  # as its preset has it
    ],
)  # fmt: skip
def test_settings_of_evaluations_are_said_to_do_nothing_without_held_out_prompts(schema, flags, told, caplog):
    load_config(schema, flags.split(), preset=None)
    assert [each.message for each in caplog.records if "eval_" in each.message] == told


@pytest.mark.parametrize(
    ("schema", "flags", "told"),
    [
        (RunConfig, "--lora_alpha 32 --target_modules q_proj",
         ["lora_alpha 32 and target_modules q_proj: read by a lora_rank above 0, and does nothing here"]),
        (SFTRunConfig, "--lora_dropout 0.1",
         ["lora_dropout 0.1: read by a lora_rank above 0, and does nothing here"]),
        (DiffusionRunConfig, "--lora_rank 0 --lora_alpha 32",
         ["lora_alpha 32: read by a lora_rank above 0, and does nothing here"]),
        (DiffusionRunConfig, "--lora_alpha 32", []),
    ],
)  # fmt: skip
def test_settings_of_adapters_are_said_to_do_nothing_without_a_rank(schema, flags, told, caplog):
    load_config(schema, flags.split(), preset=None)
    assert [each.message for each in caplog.records if "lora" in each.message] == told


def test_attention_goes_by_the_names_of_transformers_and_those_of_flash_attention_on_the_hub():
    hub = ("kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3@v1:fwd")
    for name in ("flash_attention_2", "flash_attention_3", *hub):
        assert ModelConfig(attn_implementation=name).attn_implementation == name
    for name in ("flash_attention", "kernels-community/moe", "a/b/flash"):
        with pytest.raises(ConfigError, match="flash_attention_3, or FlashAttention of the hub, such as"):
            ModelConfig(attn_implementation=name)


@pytest.mark.parametrize(
    ("updates", "ratio", "warmup"), [(1, 0.03, 0), (1, 0.0, 0), (2, 0.03, 1), (40, 0.03, 2), (4, 1.0, 3)]
)
def test_warm_up_leaves_at_least_one_step_at_the_full_rate(updates, ratio, warmup):
    """Its first step has rate 0: a run of one step would train nothing."""
    assert TrainConfig(lr_warmup_ratio=ratio).schedule(updates) == ("cosine_with_min_lr", warmup)
