"""Four steps are those of a run that goes on from the checkpoint of the second: bit for bit."""

from __future__ import annotations

import pytest
from plans import RESUMED
from whole_runs import rollouts, rows, weights


@pytest.fixture(params=["one_rank", "two_ranks"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", RESUMED)
def test_metrics_are_equal(folder, name):
    whole, resumed = rows(folder / name), rows(folder / f"{name}_resumed")
    assert len(whole) == len(resumed) == 4
    assert whole == resumed


@pytest.mark.parametrize("name", RESUMED)
def test_evaluation_is_equal(folder, name):
    assert rows(folder / name, "eval_metrics.csv") == rows(folder / f"{name}_resumed", "eval_metrics.csv")


@pytest.mark.parametrize("name", RESUMED)
def test_sampled_tokens_are_equal(folder, name):
    whole, resumed = rollouts(folder / name), rollouts(folder / f"{name}_resumed")
    assert [len(step) for step in whole] == [32] * 4
    assert whole == resumed


@pytest.mark.parametrize("name", RESUMED)
def test_weights_are_equal_and_have_moved(folder, name):
    assert weights(folder / name) == weights(folder / f"{name}_resumed")
    assert (folder / f"{name}_resumed" / "checkpoint-000002").is_dir()


@pytest.mark.parametrize("name,column", [("grpo_3", "learning_rate"), ("ppo_2", "critic_learning_rate")])
def test_a_learning_rate_of_the_resuming_command_is_used(folder, name, column):
    whole, changed = rows(folder / name), rows(folder / f"{name}_changed")
    assert [row[column] for row in changed[:2]] == [row[column] for row in whole[:2]]
    assert [row[column] for row in changed[2:]] == pytest.approx([1e-5] * 2)


def test_a_kl_coefficient_of_the_resuming_command_is_used(folder):
    assert rows(folder / "ppo_2")[2]["kl_coef"] < 0.1
    assert rows(folder / "ppo_2_changed")[2]["kl_coef"] == pytest.approx(0.5, rel=0.2)
