"""The algorithm that an example script is named after is a default: recipes, layers and flags win over it."""

import runpy
import sys
from pathlib import Path

import pytest
import yaml

from lightrft_visual.config import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIFFUSION = {"train_flow_grpo": "flow_grpo", "train_diffusion_nft": "diffusion_nft", "train_ddpo": "ddpo",
             "train_reward_fl": "reward_fl"}  # fmt: skip
VL = {"train_grpo_vl": "group_norm", "train_ppo_vl": "gae", "train_rloo_vl": "rloo"}
OCR = ["--config", "experiment/diffusion/sd3_5/online_grpo_ocr"]


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The configuration that a script prints under --dry_run."""

    def run(script: str, *arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--dry_run"])
        monkeypatch.setattr(load, "_show_plan", lambda config: 0)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        shown = capsys.readouterr()
        assert stop.value.code == 0, shown.err
        return yaml.safe_load(shown.out)

    return run


@pytest.mark.parametrize("script", DIFFUSION)
def test_a_diffusion_script_has_a_default(resolved, script: str) -> None:
    config = resolved(script)
    assert config["algorithm"]["diffusion_algorithm"] == DIFFUSION[script]
    assert config["output"]["output_dir"] == f"outputs/{DIFFUSION[script]}"  # of the algorithm's embedded preset


def test_a_recipe_chooses_the_diffusion_algorithm(resolved, tmp_path: Path) -> None:
    script, recipe = "train_ddpo", tmp_path / "mine.yaml"
    recipe.write_text("diffusion_algorithm: dance_grpo\n")
    config = resolved(script, "--config", str(recipe))
    assert config["algorithm"]["diffusion_algorithm"] == "dance_grpo"
    assert config["output"]["output_dir"] == "outputs/dance_grpo"
    swapped = resolved(script, *OCR, "/base/algorithm/diffusion=diffusion_nft")
    assert (swapped["algorithm"]["diffusion_algorithm"], swapped["sampling"]["trajectory"]) == ("diffusion_nft", "ode")


def test_a_recipe_without_an_algorithm_keeps_the_scripts(resolved, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train.seed: 7\n")
    assert resolved("train_ddpo", "--config", str(recipe))["algorithm"]["diffusion_algorithm"] == "ddpo"
    assert resolved("train_rloo_vl", "--config", str(recipe))["algorithm"]["advantage_estimator"] == "rloo"


def test_a_flag_wins_over_the_recipe(resolved) -> None:
    nft = resolved("train_ddpo", "--diffusion_algorithm", "diffusion_nft", "--max_steps", "3")
    assert (nft["algorithm"]["diffusion_algorithm"], nft["train"]["max_steps"]) == ("diffusion_nft", 3)


@pytest.mark.parametrize("script", VL)
def test_a_vision_language_script_has_a_default(resolved, script: str) -> None:
    assert resolved(script)["algorithm"]["advantage_estimator"] == VL[script]


def test_a_recipe_chooses_the_advantage_estimator(resolved) -> None:
    script, recipe = "train_ppo_vl", ["--config", "experiment/vl/geometry3k_rloo"]
    assert resolved(script, *recipe)["algorithm"]["advantage_estimator"] == "rloo"
    swapped = resolved(script, *recipe, "/base/algorithm=ppo", "offload_trainer=true")
    assert swapped["algorithm"]["advantage_estimator"] == "gae"
    assert resolved(script, *recipe, "advantage_estimator=dr_grpo")["algorithm"]["advantage_estimator"] == "dr_grpo"


def test_the_script_of_several_turns_has_a_task_and_takes_other_data(resolved) -> None:
    assert resolved("train_multi_turn_vl")["episodes"]["environment"] == "embedded_zoom"
    own = resolved(
        "train_multi_turn_vl", "--prompt_data", "rows.jsonl", "--pretrain", "m", "--environment", "my.py:Zoom"
    )
    assert (own["data"]["prompt_data"], own["episodes"]["environment"]) == ("rows.jsonl", "my.py:Zoom")
    assert own["episodes"]["max_turns"] == 8
