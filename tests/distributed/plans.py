"""The runs that the tests of this folder share. Flags say what differs from `SMALL`."""

import json
from pathlib import Path

from whole_runs import SMALL

from lightrft_visual.data.sampler import PromptSampler

MIXED_STEPS, MIXED_BATCH, SEED = 2, 2, 42
ENGINES = Path(__file__).with_name("plugin_engines.py")
SPREAD = f"--plugins {ENGINES} --reward.components.response_spread=1.0"


def small(flags: str) -> list[str]:
    """Of 64 questions: to look at all of the embedded ones takes as long as three steps."""
    return [*SMALL, "--max_samples", "64", *flags.split()]


def given(flags: str) -> list[str]:
    """A run whose tokens are given, for runs that are compared though they round otherwise."""
    return small(f"{flags} --engine_type given {SPREAD}")


RESUMED = {
    "grpo_2": "--zero_stage 2 --packing_samples true --papo_coef 0.02 --papo_entropy_coef 0.03 --selective_replay 64",
    "ppo_3": "--zero_stage 3 --ref_update_steps 2 --ref_update_mixup 0.5 --vision_learning_rate 1e-5 "
    "--projector_learning_rate 1e-4 --advantage_estimator gae --init_kl_coef 0.05 --kl_target 0.1 --enable_ema true "
    "--reward_running_norm true --reward_running_norm_minus_mean true",
}


def resume_runs(name: str) -> dict[str, list[str]]:
    """A run of three steps, and one that goes on from its checkpoint of step 2."""
    run = small(f"{RESUMED[name]} --save_steps 2 --max_eval_samples 4 --eval_steps 2 --max_steps 3")
    return {name: run, f"{name}_resumed": [f"copy:{name}@2", *run, "--resume_from", "auto"]}


ONE_STEP = ("bf16", "reinforce_baseline", "top_p", "gdpo", "dynamic")
FLAG_RUNS = {
    name: small(f"--max_steps {1 if name in ONE_STEP else 2} {flags}")
    for name, flags in {
        "ppo": "--advantage_estimator gae --init_kl_coef 0.05 --kl_target 0.1 --freezing_actor_steps 1",
        "rloo": "--advantage_estimator rloo --entropy_coef 0.01 --high_entropy_token_ratio 0.5 --tis_mode token "
        "--train_batch_size 16 --max_epochs 2",
        "bf16": "--bf16 true --advantage_estimator reinforce --policy_loss gspo --loss_agg_mode seq-mean-token-mean "
        "--tis_mode sequence --tis_mask true --n_samples_per_prompt 1 --rollout_batch_size 32",
        "reinforce_baseline": "--advantage_estimator reinforce_baseline --policy_loss cispo --advantages_norm true "
        "--advantage_clip 0.5 --reward_clip 0.5",
        "top_p": "--advantage_estimator cpgd --policy_loss cpgd --cpgd_alpha 0.1 --reward_running_norm true "
        "--reward_running_norm_minus_mean true --top_p 0.9 --temperature 0.8 --loss_agg_mode seq-mean-token-sum",
        "gdpo": "--advantage_estimator gdpo --policy_loss sapo --overlong_buffer true --overlong_buffer_len 7 "
        "--tis_mode token --tis_mask true --tis_floor 0.5 --tis_cap 5 --mask_truncated true",
        "kl_loss_lora": "--use_kl_loss true --kl_estimator k3 --init_kl_coef 0.1 --lora_rank 4 "
        "--actor_learning_rate 1e-2",
        "ema": "--enable_ema true --eval_ema true --ema_beta 0.5",
        "freeze": "--freeze_prefix true --gradient_checkpointing true --papo_coef 0.1 --advantage_estimator dr_grpo "
        "--policy_loss gmpo --loss_agg_mode seq-mean-token-sum-norm --overlong_buffer true --overlong_buffer_len 7",
        "fire": "--use_fire true --first_token_temperature 3 --dual_clip 3 --eps_clip_high 0.28 "
        "--teacher_pretrain embedded --teacher_coef 0.5 --max_samples 100000",
        "dynamic": "--dynamic_sampling true --dynamic_sampling_max_tries 3",
        "linear": "--lr_scheduler linear --lr_warmup_ratio 0.5 --l2 0.1 --max_norm 0.1 --noisy_rollout_share 0.5",
    }.items()
}

# 28 good rows and the bad ones: the steps see all of them.
HOSTILE_ROWS, HOSTILE_STEPS = 28, 4
HOSTILE = small(
    "--prompt_data {hostile} --max_samples 1000 --on_bad_row skip --on_long_prompt skip --max_bad_share 0.7 "
    f"--save_steps 2 --report true --max_steps {HOSTILE_STEPS}"
)

# A model that sees and draws, of {janus}: rank 0 of 2 meets only questions, rank 1 only captions to draw.
UNIFIED_STEPS = 2
_UNIFIED_GIVEN = (
    f"--pretrain {{janus}} --prompt_data {{captions}} --guidance_scale 2 --max_steps {UNIFIED_STEPS} "
    f"--rollout_batch_size {MIXED_BATCH} --train_batch_size {MIXED_BATCH * 4} --generate_max_len 6 "
    f"--prompt_max_len 256 --actor_learning_rate 1e-4 --init_kl_coef 0.05 {SPREAD} --answer_loss_weight 2 "
    "--engine_type given"
)
# The same model, on rows of both kinds that are also held out.
_BOTH = (
    "--pretrain {janus} --prompt_data {both} --engine_type hf --guidance_scale 2 --max_steps 2 "
    "--rollout_batch_size 4 --train_batch_size 16 --generate_max_len 6 --prompt_max_len 256 --actor_learning_rate 1e-3 "
    f"{SPREAD} --max_eval_samples 4 --eval_data {{both}}"
)
# Rewards of a server that answers late, and not for all samples.
LATE = small(f"--engine_type given --plugins {ENGINES} --max_steps 1 --init_kl_coef 0.05 --remote_rm_url {{late}}")
ONE_RANK = {
    "base": small("--max_steps 2 --max_eval_samples 8"),
    "given": given("--max_steps 2 --zero_stage 0 --max_eval_samples 8"),
    "updates": given("--max_steps 1 --train_batch_size 16 --max_epochs 2"),
    "updates_separate": given("--max_steps 1 --train_batch_size 16 --max_epochs 2 --separate_old_log_probs true"),
    "stale": small(
        f"--max_steps 2 --engine_type loses_a_sync --plugins {ENGINES} --packing_samples true --init_kl_coef 0 "
        "--train_batch_size 16"
    ),
    "eight_bits": small(
        f"--max_steps 1 --engine_type in_eight_bits --plugins {ENGINES} --engine_quantization fp8 --tis_mode token"
    ),
    "packed": given("--max_steps 2 --share_prefix false --packing_samples true"),
    "budget": given("--max_steps 2 --packing_samples true --max_tokens_per_batch 300"),
    "late": LATE,
    "unified": small(_UNIFIED_GIVEN),
    "both": small(_BOTH),
    "unified_packed": small(f"{_UNIFIED_GIVEN} --packing_samples true"),
    **FLAG_RUNS,
    **resume_runs("grpo_2"),
    "hostile": HOSTILE,
}
# Those that train like `given` on one rank; in "sequence" both ranks train on each sample, half of its tokens each; in
# "balanced" they generate for each other.
LIKE_ONE = {
    "balanced": given("--max_steps 2 --zero_stage 0 --max_eval_samples 8 --balance_rollouts true"),
    "sequence": given("--max_steps 2 --zero_stage 1 --max_eval_samples 8 --sp_size 2"),
    "stage_2": given("--max_steps 2 --zero_stage 2 --max_eval_samples 8"),
    "stage_3": given("--max_steps 2 --zero_stage 3 --max_eval_samples 8"),
}
TWO_RANKS = {
    **LIKE_ONE,
    "mixed": small(
        f"--zero_stage 3 --prompt_data {{rows}} --max_steps {MIXED_STEPS} "
        f"--rollout_batch_size {MIXED_BATCH} --train_batch_size {MIXED_BATCH * 4}"
    ),
    "unified_3": small(f"{_UNIFIED_GIVEN} --zero_stage 3"),
    "late_2": [*LATE, "--zero_stage", "2"],
    **resume_runs("ppo_3"),
    "hostile": HOSTILE,
    "hostile_resumed": ["copy:hostile@2", *HOSTILE, "--resume_from", "auto"],
}
CHANGED = "--init_kl_coef 0.5 --actor_learning_rate 1e-5 --critic_learning_rate 1e-5"
TWO_RANKS["ppo_3_changed"] = [*TWO_RANKS["ppo_3_resumed"], *CHANGED.split()]


TEXT_ROW = {"prompt": "How many?", "reference": "2", "label": "text"}
DRAWN_ROW = {"prompt": "a red circle", "draw": True, "label": "drawing"}


def rows_apart(embedded: Path, target: Path, other: dict = TEXT_ROW, steps: int = MIXED_STEPS) -> Path:
    """A data file for `steps` in which, in the order of a run, rank 0 of 2 meets only images and rank 1 only rows like
    `other`."""
    with_images = [json.loads(line) for line in embedded.read_text(encoding="utf-8").splitlines()]
    count = steps * MIXED_BATCH
    rows: list[dict] = [{}] * count
    sampler = PromptSampler([count], MIXED_BATCH, seed=SEED)
    for _ in range(steps):
        for place, index in enumerate(sampler.next_batch()):
            row = with_images[index]
            images = row["images"] if isinstance(row["images"], list) else [row["images"]]
            row["images"] = [str(embedded.parent / image) for image in images]
            rows[index] = row if place % 2 == 0 else other
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return target
