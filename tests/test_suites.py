"""Published protocols: `lightrft-visual eval CHECKPOINT --suite NAME`, on prompts in their published form."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from forked import run_alone
from PIL import Image

from lightrft_visual.config.load import parse_run
from lightrft_visual.config.spellings import ROOTS

ODE = {"eval_num_steps": 40, "guidance_scale": 4.5, "height": 512, "width": 512, "eval_seed": 42}
EASYR1 = {
    "temperature": 0.6, "top_p": 0.95, "eval_samples_per_prompt": 1, "generate_max_len": 2048, "min_pixels": 262144,
    "max_pixels": 4194304, "eval_seed": 1, "max_eval_samples": 601,
}  # fmt: skip
# Flow-GRPO's config/grpo.py; EasyR1's examples/config.yaml.
PINNED = {
    "geneval": ODE | {"components": {"geneval": 1.0}, "label_key": "tag", "max_eval_samples": 2212},
    "ocr": ODE | {"components": {"ocr": 1.0}, "max_eval_samples": 1018},
    "drawbench": ODE | {"components": {"pick_score": 1.0}, "max_eval_samples": 200},
    "geometry3k": EASYR1 | {"kwargs": {"geometry3k": {"grader": "easyr1"}}},
    "geometry3k_verl": EASYR1 | {"kwargs": {"geometry3k": {"grader": "verl"}}},
}


@pytest.mark.parametrize("name", PINNED)
def test_a_suite_pins_the_published_values(name):
    draws = name in ("geneval", "ocr", "drawbench")
    root = next(root for root in ROOTS if root.kind == ("diffusion" if draws else "vl"))
    config = parse_run(root.schema, ["--config", f"suite/{name}"], preset=root.preset).config
    sections = [
        getattr(config, section) for section in ("data", "reward", "output", "sampling" if draws else "rollout")
    ]
    for setting, value in PINNED[name].items():
        assert [getattr(each, setting) for each in sections if hasattr(each, setting)] == [value], setting


EVALUATE = """
import os, sys
from lightrft_visual.cli import main

os.chdir(os.path.dirname(sys.argv[0]))
main()
"""


def evaluated(folder: Path, *arguments: str) -> tuple[dict, str]:
    """(evaluation.json, what is said) of the command in a folder."""
    (folder / "evaluate.py").write_text(EVALUATE)
    said = run_alone(folder / "evaluate.py", "eval", *arguments, limit=300)
    return json.loads((folder / "evaluation.json").read_text()), said


@pytest.mark.slow
def test_a_drawing_suite_scores_each_task_and_writes_what_it_was_made_with(tmp_path):
    from lightrft_visual.models.tiny.diffusion import TinyDiffusionSettings, build_pipeline

    build_pipeline(TinyDiffusionSettings()).save_pretrained(tmp_path / "pipeline")
    asked = {"include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"}
    rows = [{"tag": tag, **asked} for tag in ("counting", "colors", "colors")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tag.py").write_text("def score(images, tag):\n    return [float(each == 'colors') for each in tag]\n")
    own = "--height 32 --width 32 --eval_num_steps 2".split()
    found, said = evaluated(
        tmp_path, "pipeline", "--data", "rows.jsonl", "--suite", "geneval", "--reward", "tag.py:score", *own
    )
    metrics = found["metrics"]
    assert metrics["eval_reward_colors"] == 1 and metrics["eval_reward_counting"] == 0
    assert metrics["eval_reward_label_mean"] == 0.5 and metrics["eval_reward"] == pytest.approx(2 / 3)
    sampling = {"sampler": "ode", "eval_num_steps": 2, "guidance_scale": 4.5, "height": 32}
    assert sampling.items() <= found["sampling"].items() and found["seed"] == 42 and found["suite"] == "geneval"
    assert found["checkpoint"] == "pipeline" and found["prompts"]["count"] == 3 and found["versions"]["torch"]
    assert "eval_num_steps 2, guidance_scale 4.5, height 32" in said and "eval_reward_label_mean 0.5000" in said


@pytest.mark.slow
def test_geometry3k_is_graded_by_both_graders_on_rows_of_its_form(tmp_path):
    from lightrft_visual.models.tiny.vlm import build_tiny_checkpoint

    build_tiny_checkpoint(str(tmp_path / "model"), "qwen2_vl")
    (tmp_path / "mathruler").mkdir()  # stands in for the package: every answer is right
    (tmp_path / "mathruler" / "__init__.py").write_text("")
    (tmp_path / "mathruler" / "grader.py").write_text(
        "extract_boxed_content = str\ndef grade_answer(given, truth):\n    return truth == '3'\n"
    )
    rows = [
        {"images": [Image.new("RGB", (60, 60), "red")], "problem": "<image>Find x.", "answer": answer}
        for answer in "34"
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    own = "--engine_type hf --generate_max_len 8 --min_pixels 3136 --max_pixels 50176".split()
    found, _ = evaluated(tmp_path, "model", "--data", "rows", "--suite", "geometry3k_verl", *own)
    assert found["metrics"]["eval_reward"] == found["metrics"]["eval_reward_greedy"] == pytest.approx(0.45)
    assert found["metrics"]["validation/reward/easyr1"] == found["metrics"]["validation/reward/verl"]
    assert found["rollout"]["temperature"] == 0.6 and found["data"]["data_format"] == "geometry3k"
