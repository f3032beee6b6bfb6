"""Whole runs with environments: on one rank and two, resumed, with every kind of estimator, and a single turn."""

from pathlib import Path

import pytest
from plans import small
from test_rank_count import largest_difference
from whole_runs import rollouts, rows, run_plan, weights

pytestmark = pytest.mark.slow
TALKING = Path(__file__).with_name("talking.py")
MIXED = ["--engine_type", "hf", "--environment", f"{TALKING}:Mixed", "--max_turns", "5"]
_RUN = [*small("--save_steps 1 --max_steps 2"), *MIXED]
PPO = ["--advantage_estimator", "gae", "--turn_gamma", "0.9"]
ONE = {
    "plain": [*small("--max_steps 2"), "--engine_type", "hf"],
    "once": [
        *small("--max_steps 2"), "--engine_type", "hf", "--environment", f"{TALKING}:Once", "--reward.components",
        "{exact: 1.0}",
    ],
    "mixed": _RUN,
    "mixed_resumed": ["copy:mixed@1", *_RUN, "--resume_from", "auto"],
    "ppo": [*_RUN, *PPO, "--share_prefix", "false"],
    "ppo_packed": [*_RUN, *PPO, "--packing_samples", "true"],
    "lora": [
        *_RUN, "--lora_rank", "4", "--papo_coef", "0.1", "--high_entropy_token_ratio", "0.5", "--policy_loss", "gspo",
        "--advantage_estimator", "rloo",
    ],
}  # fmt: skip
TWO = {
    "stage_3": [*_RUN, "--zero_stage", "3"],
    "tensor_parallel": [*_RUN, "--engine_type", "vllm", "--engine_tp_size", "2"],
}


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache_root) -> Path:
    return run_plan(ONE, tmp_path_factory.mktemp("one"), cache_root, ranks=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache_root) -> Path:
    return run_plan(TWO, tmp_path_factory.mktemp("two"), cache_root, ranks=2)


def test_one_turn_with_an_environment_trains_the_same_bits_as_without(one):
    assert weights(one / "plain") == weights(one / "once")
    ours, theirs = rows(one / "plain"), rows(one / "once")
    for a, b in zip(ours, theirs, strict=True):
        assert {name: b[name] for name in a if name in b} == {name: a[name] for name in a if name in b}
        assert {"turns", "observation_tokens_share", "environment_errors"} <= b.keys() and b["turns"] == 1
    assert [[r["response"] for r in step] for step in rollouts(one / "plain")] == [
        [r["response"] for r in step] for step in rollouts(one / "once")
    ]


def test_a_resumed_run_is_the_whole_one_bit_for_bit(one):
    assert rows(one / "mixed") == rows(one / "mixed_resumed")
    assert weights(one / "mixed") == weights(one / "mixed_resumed")
    assert rollouts(one / "mixed") == rollouts(one / "mixed_resumed")


def test_two_ranks_with_other_numbers_of_turns_train_like_one(one, two):
    ours, theirs = rows(one / "mixed"), rows(two / "stage_3")
    assert all(1 < row["turns"] < 4 for row in ours)
    assert largest_difference(ours, theirs, (*NAMES, "turns", "observation_tokens_share")) < 1e-5


NAMES = ("loss", "reward_mean", "grad_norm", "kl", "response_length", "tokens", "advantage_abs")


def test_what_is_trained_does_not_depend_on_packing_or_shared_prompts(one):
    ours, theirs = rows(one / "ppo"), rows(one / "ppo_packed")
    assert largest_difference(ours[:1], theirs[:1], ("loss", "grad_norm", "entropy")) < 1e-5
    assert largest_difference(ours, theirs, ("loss", "grad_norm")) < 1e-4


@pytest.mark.parametrize("ranks, name", [("one", "ppo"), ("one", "lora"), ("two", "tensor_parallel")])
def test_every_kind_of_run_trains_also_on_ranks_of_one_engine(request, ranks, name):
    found = rows(request.getfixturevalue(ranks) / name)
    assert len(found) == 2 and all(row["grad_norm"] > 0 and row["turns"] > 1 for row in found)
    assert all(row["rollout_logp_diff_max"] <= 1e-5 for row in found)
    assert all(row["environment_errors"] == 0 and row["observation_tokens_share"] > 0.3 for row in found)
