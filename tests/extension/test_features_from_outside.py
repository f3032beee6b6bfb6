"""A term of the loss, a hook with state and a scorer are one file each outside of the package, and runs are made with
them; so is a run with callbacks from Python."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import pytest
from forked import run_alone

DRIVER = Path(__file__).with_name("feature_runs.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory, cache_root) -> Path:
    folder = tmp_path_factory.mktemp("features")
    run_alone(DRIVER, folder, limit=800, PYTHONPATH=str(ROOT))
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if value and "time" not in name} for row in found]


def records(folder: Path, step: int) -> list[dict]:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_term_of_the_loss_brings_its_part_of_the_forward_its_share_and_its_metric(made):
    for row in rows(made / "term"):
        assert row["calm"] > 0
        assert row["loss"] - row["policy_loss"] == pytest.approx(0.5 * row["calm"], rel=1e-4)
    assert all("calm" not in row for row in rows(made / "scorer"))


def test_a_scorer_is_named_among_the_rewards(made):
    for step, row in enumerate(rows(made / "scorer"), start=1):
        found = records(made / "scorer", step)
        texts = [record["response"].lower() for record in found]
        expected = [sum(text.count(letter) for letter in "aeiou") / max(1, len(text)) for text in texts]
        assert [record["reward"] for record in found] == pytest.approx(expected)
        assert len(found) == 8 and row["reward/vowels"] == pytest.approx(sum(expected) / 8, abs=1e-6)


def test_a_hook_changes_rewards_and_goes_on_exactly_after_a_resume(made):
    whole, resumed = rows(made / "hook"), rows(made / "hook_resumed")
    assert [row["dice_thrown"] for row in whole] == [8, 16, 24, 32]
    assert all(row["reward_mean"] > 1 for row in whole)  # a throw is 1 at least, a length less than that
    assert resumed == whole[2:]
    assert [records(made / "hook", step) for step in (3, 4)] == [
        records(made / "hook_resumed", step) for step in (3, 4)
    ]
    weights = [
        hashlib.sha256((made / name / "checkpoint-final" / "model.safetensors").read_bytes()).hexdigest()
        for name in ("hook", "hook_resumed")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("name", "planned", "samples"), [("callbacks", 4, 8), ("diffusion", 3, 4)])
def test_callbacks_follow_a_run_and_end_it(made, name, planned, samples):
    told = json.loads((made / "facts.json").read_text())[name]
    step = [f"scores of {samples}", "update, applied True"]
    assert told == [f"setup of {planned} steps", *step, *step, "closed"]
    assert len(rows(made / name)) == 2
    assert (made / name / "checkpoint-000002").is_dir() and (made / name / "checkpoint-final").is_dir()
