"""Runs whose rollouts are made by workers, beside the same runs without: see `split_runs.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    script = Path(__file__).with_name("split_runs.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "facts.json").read_text())


def test_a_killed_worker_changes_no_metric(facts):
    """Bit for bit those of the colocated run: nothing is lost, doubled or drawn otherwise."""
    assert len(facts["killed"]) == 4
    assert facts["killed"] == facts["colocated"]


def test_images_drawn_by_a_worker_are_those_of_the_colocated_run(facts):
    assert len(facts["drawn_split"]) == 3
    assert facts["drawn_split"] == facts["drawn"]


def test_a_resumed_run_draws_the_prompts_that_were_in_flight(facts):
    first, again = facts["prompts"]
    assert first == again and len(first) == 2 and all(len(groups) == 4 for groups in first)
    assert [row["step"] for row in facts["again"]] == ["3", "4"]


def test_rollouts_ahead_stay_within_the_staleness(facts):
    rows = facts["ahead"]
    assert len(rows) == 4
    assert all(float(row["staleness_max"]) <= 1 and float(row["dropped_stale_share"]) == 0 for row in rows)
    assert float(rows[0]["staleness_mean"]) == 0 and any(float(row["staleness_1"]) > 0 for row in rows)
    assert rows[0]["reward_mean"] == facts["colocated"][0]["reward_mean"]  # the same weights drew the same responses
    assert all(0 <= float(row["idle_engines"]) <= 1 and float(row["idle_trainer"]) >= 0 for row in rows)
