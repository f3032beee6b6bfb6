"""Whole runs of a tiny mixture of experts on two ranks: replay, balance, LoRA on experts, ZeRO-3."""

import json
from pathlib import Path

import pytest
from moe import moe_checkpoint
from whole_runs import rows, run_plan

SIZE = (
    "--rollout_batch_size 4 --n_samples_per_prompt 4 --micro_rollout_batch_size 4 --train_batch_size 8 "
    "--micro_train_batch_size 4 --generate_max_len 6 --prompt_max_len 64 --max_steps 2 --max_eval_samples 0 "
    "--engine_type hf --report false --router_aux_loss_coef 0.01 --actor_learning_rate 1e-3"
)
RUNS = {
    "divided": "--zero_stage 3 --packing_samples --gradient_checkpointing --routing_replay rollout",
    "whole": "--zero_stage 2 --packing_samples --gradient_checkpointing --routing_replay rollout",
    "adapters": "--lora_rank 4 --target_modules q_proj --target_parameters experts.gate_up_proj,experts.down_proj "
    "--routing_replay old",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory, cache_root) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    model = moe_checkpoint(folder / "model").path
    lines = (json.dumps({"prompt": f"what is {n} plus 2?", "reference": str(n + 2)}) for n in range(8))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "score.py").write_text("def score(completions):\n    return [len(text) % 3 for text in completions]\n")
    given = f"{SIZE} --pretrain {model} --prompt_data {folder}/rows.jsonl --reward_fn {folder}/score.py:score"
    return run_plan({name: f"{given} {flags}".split() for name, flags in RUNS.items()}, folder, cache_root, 2)


@pytest.mark.parametrize("name", RUNS)
def test_a_step_replays_balances_and_says_so(ran, name):
    first, second = rows(ran / name)
    assert first["ratio_max_dev_first"] < 2e-6 and second["ratio_max_dev"] > 1e-4
    # In the second step an update has moved the routers between rollout and the second update.
    assert first["routed_otherwise"] < 0.01 and 0 < second["routed_otherwise"] < 0.2
    assert all(2.9 < each["router_loss"] < 24 for each in (first, second))  # 3 experts a token, of 24


def test_a_divided_mixture_trains_as_a_whole_one(ran):
    for mine, other in zip(rows(ran / "divided"), rows(ran / "whole"), strict=True):
        assert mine["reward_mean"] == other["reward_mean"]
        assert mine["router_loss"] == pytest.approx(other["router_loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
