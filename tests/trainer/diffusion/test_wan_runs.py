"""Videos end to end: Flow-GRPO on a text-to-video model, Reward FL on a two-expert image-to-video one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from forked import run_alone
from PIL import Image

DRIVER = Path(__file__).with_name("wan_runs.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root):
    place = tmp_path_factory.mktemp("wan")
    run_alone(DRIVER, place, limit=280)
    return place


def facts(folder: Path, run: str) -> dict:
    return json.loads((folder / "facts.json").read_text())[run]


def last_row(folder: Path, run: str) -> dict[str, str]:
    with open(folder / f"out_{run}" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))[-1]


def test_evaluated_videos_are_a_strip_and_mp4_files(folder) -> None:
    sheets = folder / "out_text" / "eval_epoch_000001"
    assert Image.open(sheets / "contact_sheet.png").width > 300
    assert [path.name for path in sorted(sheets.glob("*.mp4"))] == ["video_000.mp4", "video_001.mp4"]
    assert (folder / "out_text" / "checkpoint-final").is_dir() and facts(folder, "text")["moved"] == ["transformer"]
    assert float(last_row(folder, "text")["ratio_max_dev_first"]) == 0.0


def test_only_the_expert_inside_the_boundaries_moves(folder) -> None:
    found = facts(folder, "high")
    assert (found["moved"], found["adapted"]) == (["transformer"], ["transformer", "transformer_2"])


def test_trainable_models_adapts_no_other_expert(folder) -> None:
    found = facts(folder, "low")
    assert found["moved"] == found["adapted"] == ["transformer_2"]


@pytest.mark.parametrize("run", ["second", "second_replayed", "second_matched"])
def test_one_expert_trains_on_the_steps_that_it_serves(folder, run) -> None:
    found, row = facts(folder, run), last_row(folder, run)
    assert found["moved"] == found["adapted"] == ["transformer_2"] and found["updates"] == 1
    assert float(row["grad_norm"]) > 0 and float(row.get("ratio_max_dev_first") or 0.0) < 1e-6


def test_a_window_of_steps_that_the_other_expert_serves_gives_no_gradient(folder) -> None:
    assert float(last_row(folder, "second_window")["grad_norm"]) == 0.0


def test_an_expert_that_serves_no_trained_step_is_frozen_or_refused(folder) -> None:
    assert facts(folder, "both_high")["moved"] == ["transformer"]  # no weight decay moves the other
    assert facts(folder, "unserved") == (
        "the steps with gradient are served by transformer, which trainable_models leaves out"
    )


def test_the_settings_of_roll_train_the_low_noise_expert_in_rounds_of_updates(folder) -> None:
    found = facts(folder, "roll")
    assert found["moved"] == found["adapted"] == ["transformer_2"]
    assert found["updates"] == 4  # two samples, one an update, two rounds (num_train_epochs)


def test_faces_are_scored_against_the_first_frame_of_the_csv(folder) -> None:
    row = last_row(folder, "low")
    assert -1 <= float(row["reward_mean"]) <= 1 and float(row["invalid_share"]) == 0.0


def test_a_step_without_any_face_ends_the_run_and_moves_nothing(folder) -> None:
    found = facts(folder, "faceless")
    assert found["error"].startswith("step 1: 100% of the samples are invalid") and found["moved"] == []
    assert all(facts(folder, run)["error"] is None for run in ("text", "high", "low", "roll"))
