"""A NaN loss on one of two ranks: no rank steps, all weights stay, and three in a row end the run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from forked import run_on_ranks
from whole_runs import LIMIT, SMALL, environment

SCRIPT = Path(__file__).with_name("nan_run.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root) -> Path:
    folder = tmp_path_factory.mktemp("nan")
    flags = [*SMALL, "--engine_type", "hf", "--max_samples", "64"]
    run_on_ranks(SCRIPT, [str(folder), *flags], environment(cache_root), 2, LIMIT)
    return folder


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_stay_bit_identical_on_both_ranks(folder, stage):
    ranks = [json.loads((folder / f"{stage}_rank{rank}.json").read_text()) for rank in range(2)]
    weights = ranks[0]["weights"]
    assert ranks[1]["weights"] == weights
    assert weights[0] != weights[1] == weights[2] != weights[3]  # steps 1 and 3 trained, step 2 did not
    assert weights[3] == weights[-1]  # steps 4, 5 and 6 did not
    for rank in ranks:
        assert "step 6" in rank["error"] and "3 in a row" in rank["error"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_skipped_steps_are_in_the_metrics(folder, stage):
    with open(folder / f"run_{stage}" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["skipped_steps"]) for row in rows] == [0, 1, 0, 1, 1]
    assert rows[1]["grad_norm"] == ""
