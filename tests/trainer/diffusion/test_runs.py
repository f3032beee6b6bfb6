"""Whole diffusion runs: evaluation, contact sheets, EMA, the exported LoRA in the stock pipeline, and bad input."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from drawing_runs import facts, rows
from forked import run_alone
from PIL import Image
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("picture_runs.py")
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_root) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "said.txt").write_text(run_alone(SCRIPT, folder, limit=800))
    return folder


def sheet(folder: Path, name: str, step: int) -> np.ndarray:
    return np.asarray(Image.open(folder / name / f"eval_epoch_{step:06d}" / "contact_sheet.png").convert("RGB"))


def test_a_run_says_its_stages(folder):
    said = re.findall(r"^\[ *[\d.]+ s\] (.*)$", (folder / "said.txt").read_text(), re.MULTILINE)
    first = said.index("loading the models")
    assert said[first - 2 : first] == ["reading the prompts", "asking each reward once"]
    assert said[first + 1] == "evaluating the model as it is" and said[first + 2].startswith("training from step 1")


def test_a_users_function_scores_images_which_are_evaluated_and_shown_from_the_start_to_the_end(folder):
    steps, evaluated = rows(folder, "plain"), rows(folder, "plain", "eval_metrics.csv")
    assert [row["step"] for row in steps] == ["1", "2"] and facts(folder, "plain")["updates"] == 2
    assert all(0 < float(row["reward_mean"]) < 1 and float(row["reward_std"]) > 0 for row in steps)
    assert all(float(row["group_size"]) == 4 for row in steps)
    seen = [float(row["trained_prompt_num"]) for row in steps]
    assert seen[0] == 2 and seen == sorted(seen)
    assert [row["step"] for row in evaluated] == ["0", "1", "2"]
    assert facts(folder, "plain")["metrics"]["eval_reward"] == pytest.approx(float(evaluated[-1]["eval_reward"]))
    assert all("validation/reward/red" in row for row in evaluated)
    before, after = sheet(folder, "plain", 0), sheet(folder, "plain", 2)
    assert before.shape == after.shape and before.shape[1] >= 3 * 32 and not np.array_equal(before, after)
    # What the guard reads of images.
    assert all(float(steps[-1][f"image_{name}"]) > 0 for name in ("diversity", "colours", "edges", "brightness"))
    assert 0 <= float(steps[-1]["image_blank"]) <= 1
    assert not evaluated[0]["eval_drift"] and float(evaluated[-1]["eval_drift"]) > 0


def test_ema_weights_are_what_is_evaluated_and_exported(folder):
    for column in ("loss", "reward_mean", "grad_norm"):
        assert [r[column] for r in rows(folder, "plain")] == [r[column] for r in rows(folder, "averaged")]
    own = [float(row["eval_reward"]) for row in rows(folder, "plain", "eval_metrics.csv")]
    averaged = [float(row["eval_reward"]) for row in rows(folder, "averaged", "eval_metrics.csv")]
    assert own[0] == averaged[0] and own[1:] != averaged[1:]
    assert np.array_equal(sheet(folder, "plain", 0), sheet(folder, "averaged", 0))
    left, right = (load_file(folder / name / "checkpoint-final" / LORA) for name in ("plain", "averaged"))
    assert left.keys() == right.keys() and any(not torch.equal(left[key], right[key]) for key in left)


def test_the_fixed_evaluation_has_prompts_and_a_seed_of_its_own_and_goes_on_alike_after_a_resume(folder):
    assert facts(folder, "vrl")["updates"] == 2 * 2  # two prompt groups a rollout, of one an update
    drawn = {name: sheet(folder, name, 0) for name in ("vrl", "vrl_run_seed", "plain")}
    assert np.array_equal(drawn["vrl"], drawn["vrl_run_seed"])  # another seed of the run
    assert drawn["vrl"].shape != drawn["plain"].shape  # two prompts in place of three
    whole, resumed = (rows(folder, name, "eval_metrics.csv") for name in ("vrl", "vrl_resumed"))
    assert whole[-1]["step"] == resumed[-1]["step"] == "2"
    assert whole[-1]["eval_reward"] == resumed[-1]["eval_reward"] != whole[0]["eval_reward"]
    assert np.array_equal(sheet(folder, "vrl", 2), sheet(folder, "vrl_resumed", 2))


def test_the_exported_lora_changes_the_stock_pipeline(folder):
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    size = dict(height=32, width=32, num_inference_steps=3, guidance_scale=1.0, max_sequence_length=5)

    def draw() -> np.ndarray:
        return pipeline("a red circle", generator=torch.Generator().manual_seed(0), output_type="np", **size).images[0]

    base = draw()
    pipeline.load_lora_weights(folder / "plain" / "checkpoint-final")
    assert np.abs(draw() - base).max() > 1e-3
    pipeline.unload_lora_weights()
    assert np.array_equal(draw(), base)


def test_the_guard_goes_back_to_the_best_gold(folder):
    (alarm,) = (json.loads(line) for line in (folder / "rolled" / "alarms.jsonl").open())
    assert (alarm["signal"], alarm["step"], alarm["since"]) == ("eval_gold", 1, 0)
    assert facts(folder, "rolled")["steps"] == 1 and facts(folder, "rolled")["metrics"]["eval_gold"] == 1.0
    exported = load_file(folder / "rolled" / "checkpoint-final" / LORA)
    assert all(not tensor.any() for key, tensor in exported.items() if "lora_B" in key)  # as before training
    manifest = json.loads((folder / "rolled" / "checkpoint-best" / "manifest.json").read_text())
    assert manifest["step"] == 0 and manifest["metrics"]["eval_gold"] == 1.0
    looks = [json.loads(line) for line in (folder / "rolled" / "gold.jsonl").open()]
    assert [(look["kind"], look["step"]) for look in looks] == [("evaluation", 0), ("evaluation", 1)]
    assert [sum(look["gold"]) / 3 for look in looks] == pytest.approx([1.0, 1 / 2])


def test_samples_that_a_reward_does_not_apply_to_are_counted_and_masked(folder):
    row = rows(folder, "some")[0]
    assert float(row["reward_invalid_share"]) == 0.25 and float(row["group_size"]) == 3
    assert float(row["loss"]) == float(row["loss"])  # finite: NaN is no number equal to itself


@pytest.mark.parametrize(
    "name,error,text",
    (
        ("odd_size", "ConfigError", "multiples of"),
        ("frames", "ConfigError", "num_frames 5 is of videos, and this model draws images"),
        ("all_invalid", "RewardError", "step 1: 100% of the samples are invalid"),  # whatever share is allowed
        ("most_invalid", "RewardError", "75% of the samples are invalid"),
        ("other_model", "CheckpointError", "trained with pretrain '"),
        ("other_model", "CheckpointError", "--resume_other_model true"),
        ("other_seed", "DataError", "seed was 42, now it is 7"),
        ("other_seed", "DataError", "--pretrain"),
    ),
)
def test_a_run_that_cannot_train_ends_before_its_first_step(folder, name, error, text):
    found = facts(folder, name)
    assert found.get("error") == error and text in found["text"] and found["steps"] == 0, found
    assert not (folder / name / "checkpoint-final").exists()


@pytest.mark.parametrize(
    "name", ("most_invalid_allowed", "few_unknown_prompts", "few_prompts", "moved", "other_model_allowed")
)
def test_a_run_whose_data_and_model_are_allowed_trains_a_step(folder, name):
    assert facts(folder, name)["steps"] == 1 and "metrics" in facts(folder, name)


def test_more_prompts_a_step_than_there_are_is_cut_to_them(folder):
    resolved = (folder / "few_prompts" / "config.resolved.yaml").read_text()
    assert "rollout_batch_size: 3\n" in resolved and " train_batch_size: 12\n" in resolved
    assert facts(folder, "few_prompts")["updates"] == 1


@pytest.mark.parametrize(
    "name,told",
    (
        ("no_training_reward", "trains on the gradient of --differentiable_reward, and none is given"),
        ("no_gradient", "flat: its scores carry no gradient"),
        ("unknown_prompts", "shape_match cannot score 2 of 2 prompts (the first is 'a photo of a cat')"),
    ),
)
def test_a_reward_that_nothing_can_be_learned_from_is_refused_before_the_model_loads(folder, name, told):
    text = facts(folder, name)["text"]
    assert told in text, text
    assert "Rewards with a gradient are shape_match (" in text and "face_similarity" in text and "path.py:name" in text


def test_gold_without_held_out_prompts_scores_the_rollouts_of_reward_fl(folder):
    (line,) = (json.loads(line) for line in (folder / "most_invalid_allowed" / "gold.jsonl").open())
    assert (line["kind"], line["step"]) == ("step", 1)
