"""Families on two ranks that divide their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import run_ranks
from stock_families import claimed, stock_checkpoint


@pytest.mark.parametrize("name", claimed("ZeRO-3"))
def test_a_family_agrees_with_its_own_class_is_proven_and_takes_a_step_on_divided_weights(tmp_path, name):
    stock_checkpoint(tmp_path / "model", name)
    run_ranks("zero3_families_ranks.py", str(tmp_path), timeout=120, folder=Path(__file__).parent)
    (found, told), (other, same) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert max(*found, *other) <= 1e-5, (found, other)
    assert told == same and bool(told) == (name in ("gemma3", "gemma4", "mistral3"))  # those without an adapter
    if told:
        right, kept, wrong = told
        assert "run by Unregistered" in right and kept == f"{right} (found at an earlier start)"
        assert "its log-probs differ" in wrong
