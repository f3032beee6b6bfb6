"""Runs whose rollouts are made by workers, beside the same runs without: see `split_runs.py`."""

import json
import os
from pathlib import Path

import pytest
from forked import run_alone, run_on_ranks

pytest.importorskip("ray")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of workers as of trainers: others round otherwise


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    run_alone(Path(__file__).with_name("split_runs.py"), folder, limit=840, **ONE_THREAD)
    return json.loads((folder / "facts.json").read_text())


def test_a_killed_worker_changes_no_metric(facts):
    """Bit for bit those of the colocated run: nothing is lost, doubled or drawn otherwise. Weights are sent from device
    to device; the new worker finds the host's copy."""
    assert len(facts["killed"]) == 2
    assert facts["killed"] == facts["colocated"]


def test_images_drawn_by_a_worker_are_those_of_the_colocated_run(facts):
    """The worker's weights are sent from device to device."""
    assert len(facts["drawn_split"]) == 2
    assert facts["drawn_split"] == facts["drawn"]


def test_rollouts_ahead_stay_within_the_staleness(facts):
    rows = facts["ahead"]
    assert len(rows) == 3
    assert all(float(row["staleness_max"]) <= 1 and float(row["dropped_stale_share"]) == 0 for row in rows)
    assert float(rows[0]["staleness_mean"]) == 0 and any(float(row["staleness_1"]) > 0 for row in rows)
    assert rows[0]["reward_mean"] == facts["colocated"][0]["reward_mean"]  # the same weights drew the same responses
    assert all(0 <= float(row["idle_engines"]) <= 1 and float(row["idle_trainer"]) >= 0 for row in rows)
    # Only what the present weights drew can be compared with them; old log-probs are the engine's own.
    assert all(bool(row["rollout_logp_diff_max"]) == (float(row["staleness_0"]) > 0) for row in rows)
    assert "rollout_logp_diff" not in rows[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks say."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(Path(__file__).with_name("rank_runs.py"), [str(folder)], os.environ | ONE_THREAD, 2, limit=840)
    return [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_with_workers_train_as_two_without(ranks):
    """ZeRO-3, adapters, two workers: rank 0 sends each version while both gather it, without a copy; either rank asks
    either worker."""
    first, second = ranks
    assert (first["split"]["posts"], second["split"]["posts"]) == (True, False)
    assert len(first["split"]["niceness"]) == 2 and max(first["split"]["niceness"]) <= 0
    assert [[each[name]["copied"] for name in ("split", "ahead")] for each in ranks] == [[False, True]] * 2
    assert len(first["split"]["metrics"]) == 2
    assert first["split"]["metrics"] == first["colocated"]["metrics"]
    assert first["split"]["evaluated"] == first["colocated"]["evaluated"] != {}


def test_episodes_of_one_worker_run_ahead_of_two_ranks(ranks):
    rows = ranks[0]["ahead"]["metrics"]
    assert [float(row["staleness_mean"]) for row in rows] == [0, 1]
    assert all(float(row["turns"]) > 1 and float(row["environment_errors"]) == 0 for row in rows)


def test_weights_that_cannot_be_handed_over_fail_on_every_rank(ranks):
    assert [each["ahead"]["refused"] for each in ranks] == ["this version is refused"] * 2
