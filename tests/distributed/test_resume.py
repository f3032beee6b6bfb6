"""Four steps are those of a run that goes on from the checkpoint of the second: bit for bit."""

from pathlib import Path

import pytest
from plans import RESUMED_ON
from whole_runs import rollouts, rows, weights


@pytest.fixture(params=[(where, name) for where, names in RESUMED_ON.items() for name in names], ids="-".join)
def runs(request) -> tuple[Path, Path]:
    """Folders of the whole run and of the one that was resumed."""
    where, name = request.param
    folder = request.getfixturevalue(where)
    return folder / name, folder / f"{name}_resumed"


def test_metrics_evaluation_tokens_and_weights_are_equal(runs):
    whole, resumed = runs
    assert rows(whole) == rows(resumed) and len(rows(whole)) == 4
    assert rows(whole, "eval_metrics.csv") == rows(resumed, "eval_metrics.csv")
    assert rollouts(whole) == rollouts(resumed) and [len(step) for step in rollouts(whole)] == [32] * 4
    assert weights(whole) == weights(resumed) and (resumed / "checkpoint-000002").is_dir()


@pytest.mark.parametrize("column", ["learning_rate", "critic_learning_rate"])
def test_a_learning_rate_of_the_resuming_command_is_used(two_ranks, column):
    whole, changed = rows(two_ranks / "ppo_2"), rows(two_ranks / "ppo_2_changed")
    assert [row[column] for row in changed[:2]] == [row[column] for row in whole[:2]]
    assert [row[column] for row in changed[2:]] == pytest.approx([1e-5] * 2)


def test_a_kl_coefficient_of_the_resuming_command_is_used(two_ranks):
    assert rows(two_ranks / "ppo_2")[2]["kl_coef"] < 0.1
    assert rows(two_ranks / "ppo_2_changed")[2]["kl_coef"] == pytest.approx(0.5, rel=0.2)
