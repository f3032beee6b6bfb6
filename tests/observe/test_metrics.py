"""Sums over micro-batches and ranks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft_visual.observe import metrics as metrics_module
from lightrft_visual.observe.metrics import MetricsAccumulator, Moments

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30)


def test_ratio_is_of_sums_not_a_mean_of_ratios():
    accumulator = MetricsAccumulator()
    accumulator.add("loss", torch.tensor(6.0, requires_grad=True) * 1, 3)
    accumulator.add("loss", 1.0, torch.tensor(1))
    accumulator.add("plain", 2.0)
    accumulator.add("plain", 4.0)
    assert accumulator.reduce() == {"loss": 7 / 4, "plain": 3.0}
    assert accumulator.reduce() == {}


def test_masked_mean_ignores_even_nan_and_what_nothing_counts_is_left_out():
    accumulator = MetricsAccumulator()
    accumulator.add_mean("kl", torch.tensor([1.0, math.nan, 4.0]), torch.tensor([True, False, True]))
    accumulator.add_mean("kl", torch.tensor([7.0, 0.0]), torch.tensor([1, 0]))
    accumulator.add_mean("none", torch.ones(2), torch.zeros(2, dtype=torch.bool))
    accumulator.add_moments("reward", torch.zeros(0))
    assert accumulator.reduce() == {"kl": 4.0}


def test_totals_maxima_and_moments():
    accumulator = MetricsAccumulator()
    for part in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])):
        accumulator.add_total("tokens", part.sum())
        accumulator.add_max("largest", part.max())
        accumulator.add_moments("reward", part)
    result = accumulator.reduce()
    assert result["tokens"] == 12.0 and result["largest"] == 6.0
    assert result["reward_mean"] == 3.0 and result["reward_std"] == pytest.approx(math.sqrt(14 / 4))


def test_plain_numbers_are_written_as_they_are_given():
    accumulator = MetricsAccumulator()
    accumulator.add("learning_rate", 1e-3)
    accumulator.add_total("seen_tokens", 123456789.0)
    assert accumulator.reduce() == {"learning_rate": 1e-3, "seen_tokens": 123456789.0}


@pytest.mark.parametrize("order", [[1.0, math.nan], [math.nan, 1.0]])
def test_a_nan_is_never_hidden_by_a_maximum(order):
    accumulator = MetricsAccumulator()
    for value in order:
        accumulator.add_max("deviation", value)
    assert math.isnan(accumulator.reduce()["deviation"])


@given(values=NUMBERS, cut=st.integers(0, 30))
def test_moments_do_not_depend_on_the_cut(values, cut):
    whole = torch.tensor(values, dtype=torch.float64)
    merged = Moments.of(whole[:cut]).merge(Moments.of(whole[cut:]))
    assert merged.count == len(values)
    assert merged.mean == pytest.approx(whole.mean().item(), abs=1e-9)
    assert merged.std == pytest.approx(whole.std(unbiased=False).item(), abs=1e-6)


def test_ranks_are_combined_and_may_have_different_names(monkeypatch):
    other = MetricsAccumulator()
    other.add("loss", 1.0, 3.0)
    other.add("images_only", 5.0)
    other.add_max("worst", 9.0)
    other.add_total("tokens", 10)
    mine = MetricsAccumulator()
    mine.add("loss", 2.0, 1.0)
    mine.add_max("worst", 3.0)
    mine.add_total("tokens", 1)
    theirs = other._host_values()
    monkeypatch.setattr(metrics_module, "all_gather_object", lambda value: [value, theirs])
    assert mine.reduce() == {"loss": 0.75, "images_only": 5.0, "worst": 9.0, "tokens": 11.0}


def test_metrics_of_a_step_leave_the_device_by_one_read(monkeypatch):
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read.append(len(self)) or tolist(self))
    accumulator = MetricsAccumulator()
    for value in (1.0, 3.0):
        accumulator.add("loss", torch.tensor([value]), 2)
        accumulator.add_total("tokens", torch.tensor(5))
        accumulator.add_max("worst", torch.tensor(value))
        accumulator.add_max("other", -value)
    assert accumulator.reduce() == {"loss": 1.0, "tokens": 10.0, "worst": 3.0, "other": -1.0}
    assert read == [7]
