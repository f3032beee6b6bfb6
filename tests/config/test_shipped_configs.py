"""Every recipe and layer that is shipped loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_config", ROOT / "scripts" / "check_config.py")
check_config = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_config)


@pytest.mark.parametrize("name", check_config.shipped())
def test_it_loads_and_sets_something(name: str) -> None:
    assert any("command line" not in source for source in check_config.check(name, []).sources.values())


def test_vision_language_recipes_have_sound_rewards() -> None:
    from lightrft_visual.rewards.recipe import load_recipe

    for name in check_config.shipped():
        if name.startswith("experiment/vl/"):
            recipe = check_config.check(name, []).config.reward.reward_recipe
            assert recipe is None or load_recipe(recipe).components()


def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("train: {sede: 1}\n")
    assert check_config.main([]) == 0
    assert check_config.main(["embedded_vl", "--seed", "9"]) == 0
    assert "seed: 9" in capsys.readouterr().out
    assert check_config.main(["embedded_vl", "--sede", "9"]) == 1
    assert check_config.main([str(bad)]) == 1
    assert "train.sede" in capsys.readouterr().err
