"""Edits and models of two parts end to end: rewards that see source and drawn images, exact replay, what is saved."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from waiting import finished
from whole_runs import environment

DRIVER = Path(__file__).with_name("edit_runs.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root):
    place = tmp_path_factory.mktemp("edits")
    done = finished([sys.executable, str(DRIVER), str(place)], 280, env=environment(cache_root))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
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


def test_the_diffusion_half_of_a_model_of_two_parts_is_trained(folder) -> None:
    assert facts(folder, "two_parts") == {"updates": 1}
    assert all(float(row["ratio_max_dev_first"]) == 0.0 for row in rows(folder, "two_parts"))
    pipeline = DiffusionPipeline.from_pretrained(folder / "glm")
    (weights,) = (folder / "two_parts" / "checkpoint-final").rglob("pytorch_lora_weights.safetensors")
    pipeline.transformer.load_lora_adapter(weights.parent, weight_name=weights.name)


@pytest.mark.parametrize("run", ["tokens", "tokens_whole"])
def test_the_autoregressive_half_is_trained_where_the_run_is_told_to(folder, run) -> None:
    assert facts(folder, run) == {"updates": 1}
    found = rows(folder, run)
    assert all(float(row["ratio_max_dev_first"]) < 1e-5 and 0 <= float(row["reward_mean"]) <= 1 for row in found)
    before = DiffusionPipeline.from_pretrained(folder / "glm").vision_language_encoder.state_dict()
    saved = folder / run / "checkpoint-final"
    if run == "tokens":
        stock = DiffusionPipeline.from_pretrained(folder / "glm")
        (adapter,) = saved.rglob("vision_language_encoder")
        stock.vision_language_encoder.load_adapter(adapter)
    else:
        stock = DiffusionPipeline.from_pretrained(next(saved.rglob("model_index.json")).parent)
        after = stock.vision_language_encoder.state_dict()
        assert any(not torch.equal(value, after[name]) for name, value in before.items())
    settings = stock.vision_language_encoder.generation_config
    settings.suppress_tokens = [*range(32, 40)]  # ids that are no image, which random weights draw too
    stock.set_progress_bar_config(disable=True)
    drawn = stock("a red circle", height=32, width=32, num_inference_steps=2, output_type="pt").images
    assert drawn.shape == (1, 3, 32, 32)


def test_algorithms_and_halves_that_do_not_fit_are_refused(folder) -> None:
    assert "train it by diffusion_algorithm token_grpo" in facts(folder, "tokens_by_steps")["text"]
    assert "set trainable_models vision_language_encoder" in facts(folder, "steps_by_tokens")["text"]
    assert (
        "no 'vision_language_encodr'; did you mean 'vision_language_encoder'?" in facts(folder, "half_misspelt")["text"]
    )


def test_its_lora_goes_into_the_stock_pipeline(folder) -> None:
    pipeline = DiffusionPipeline.from_pretrained(folder / "edit")
    (weights,) = (folder / "flow_grpo" / "checkpoint-final").rglob("pytorch_lora_weights.safetensors")
    pipeline.load_lora_weights(weights.parent)
    assert pipeline.get_active_adapters()


def test_more_images_than_the_model_takes_and_settings_of_edits_elsewhere_are_refused(folder) -> None:
    assert "2 images in column 'images'; this model takes 1" in facts(folder, "too_many")["text"]
    assert "source_pixels" in facts(folder, "no_edits")["text"]
