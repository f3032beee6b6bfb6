"""Edits end to end: rewards that see source and drawn images, exact replay, what is saved."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from forked import run_alone

DRIVER = Path(__file__).with_name("edit_runs.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root):
    place = tmp_path_factory.mktemp("edits")
    run_alone(DRIVER, place, limit=280)
    return place


def facts(folder: Path, run: str) -> dict:
    return json.loads((folder / "facts.json").read_text())[run]


def rows(folder: Path, run: str) -> list[dict[str, str]]:
    with open(folder / run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("run", ["flow_grpo", "nft", "many"])
def test_edits_are_trained_by(folder, run) -> None:
    assert facts(folder, run) == {"updates": 2 if run == "flow_grpo" else 1}
    found = rows(folder, run)
    assert all(-1 <= float(row["reward_mean"]) <= 0 and float(row["reward_invalid_share"]) == 0 for row in found)
    if run != "nft":
        assert all(float(row["ratio_max_dev_first"]) == 0.0 for row in found)
    assert (folder / run / "checkpoint-final").is_dir()
    assert bool([*(folder / run).glob("eval_epoch_*/contact_sheet.png")]) == (run == "flow_grpo")


def test_its_lora_goes_into_the_stock_pipeline(folder) -> None:
    pipeline = DiffusionPipeline.from_pretrained(folder / "edit")
    (weights,) = (folder / "flow_grpo" / "checkpoint-final").rglob("pytorch_lora_weights.safetensors")
    pipeline.load_lora_weights(weights.parent)
    assert pipeline.get_active_adapters()


def test_too_many_images_edits_elsewhere_and_parts_that_are_not_there_are_refused(folder) -> None:
    assert "2 images in column 'images'; this model takes 1" in facts(folder, "too_many")["text"]
    assert "source_pixels" in facts(folder, "no_edits")["text"]
    assert "this model has no 'transformr'; did you mean 'transformer'?" in facts(folder, "misspelt")["text"]
