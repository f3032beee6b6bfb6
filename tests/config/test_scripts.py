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


@pytest.mark.parametrize("script", DIFFUSION | VL)
def test_a_script_has_a_default_that_a_recipe_without_an_algorithm_keeps(resolved, script: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train.seed: 7\n")
    config = resolved(script, "--config", str(tmp_path / "mine.yaml"))
    if script in VL:
        assert config["algorithm"]["advantage_estimator"] == VL[script]
    else:
        assert config["algorithm"]["diffusion_algorithm"] == DIFFUSION[script]
        assert config["output"]["output_dir"] == f"outputs/{DIFFUSION[script]}"  # of the algorithm's embedded preset


def test_recipes_layers_and_flags_win_over_the_algorithm_of_a_script(resolved, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("diffusion_algorithm: dance_grpo\n")
    config = resolved("train_ddpo", "--config", str(tmp_path / "mine.yaml"))
    assert config["algorithm"]["diffusion_algorithm"] == "dance_grpo"
    assert config["output"]["output_dir"] == "outputs/dance_grpo"
    swapped = resolved("train_ddpo", *OCR, "/base/algorithm/diffusion=diffusion_nft")
    assert (swapped["algorithm"]["diffusion_algorithm"], swapped["sampling"]["trajectory"]) == ("diffusion_nft", "ode")
    nft = resolved("train_ddpo", "--diffusion_algorithm", "diffusion_nft", "--max_steps", "3")
    assert (nft["algorithm"]["diffusion_algorithm"], nft["train"]["max_steps"]) == ("diffusion_nft", 3)
    rloo = ["--config", "experiment/vl/geometry3k_rloo"]
    for words, estimator in (([], "rloo"), (["/base/algorithm=ppo", "offload_trainer=true"], "gae"),
                             (["advantage_estimator=dr_grpo"], "dr_grpo")):  # fmt: skip
        assert resolved("train_ppo_vl", *rloo, *words)["algorithm"]["advantage_estimator"] == estimator


def test_the_script_of_several_turns_has_a_task_and_takes_other_data(resolved) -> None:
    assert resolved("train_multi_turn_vl")["episodes"]["environment"] == "embedded_zoom"
    own = resolved(
        "train_multi_turn_vl", "--prompt_data", "rows.jsonl", "--pretrain", "m", "--environment", "my.py:Zoom"
    )
    assert (own["data"]["prompt_data"], own["episodes"]["environment"]) == ("rows.jsonl", "my.py:Zoom")
    assert own["episodes"]["max_turns"] == 8
