"""Four steps are two steps, a resume and two more: bit for bit."""

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
