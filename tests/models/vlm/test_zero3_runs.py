"""Families on two ranks that divide their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import run_ranks
from stock_families import claimed, stock_checkpoint

from lightrft_visual.models.vlm.families.unregistered import Unregistered

# Two runs, since each takes some time to start.
HALVES = claimed("ZeRO-3")[::2], claimed("ZeRO-3")[1::2]


@pytest.mark.parametrize("names", HALVES)
def test_families_agree_with_their_own_class_are_proven_and_take_a_step_on_divided_weights(tmp_path, names):
    opened = {name: stock_checkpoint(tmp_path / "models" / name, name) for name in names}
    run_ranks("zero3_families_ranks.py", str(tmp_path), timeout=240, folder=Path(__file__).parent)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert {*first} == {*second} == {*names}
    for name in names:
        (found, told), (other, same) = first[name], second[name]
        assert max(*found, *other) <= 1e-5, (name, found, other)
        assert told == same and bool(told) == (type(opened[name].family) is Unregistered), name
        if told:
            right, kept, wrong = told
            assert "run by Unregistered" in right and kept == f"{right} (found at an earlier start)"
            assert "its log-probs differ" in wrong
