"""The kit for the first visit to a GPU: its shapes are the published ones, a part that fails is told, not lost."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from waiting import polls

from lightrft_visual.errors import ConfigError

KIT = Path(__file__).parents[2] / "scripts" / "gpu"
sys.path.insert(0, str(KIT))

import check  # noqa: E402
import parts  # noqa: E402
import shapes  # noqa: E402


def parameters(build) -> float:
    with torch.device("meta"):
        model = build()
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


def test_the_language_model_has_three_billion_parameters_and_its_tower():
    from transformers import AutoModelForImageTextToText

    from lightrft_visual.models.tiny.vlm import build_tokenizer

    config = shapes.qwen_3b(build_tokenizer(shapes.TEXTS))
    assert parameters(lambda: AutoModelForImageTextToText.from_config(config)) == pytest.approx(3.75, abs=0.02)


def test_the_drawing_models_are_of_the_published_size():
    from diffusers import SD3Transformer2DModel, WanTransformer3DModel

    assert parameters(lambda: SD3Transformer2DModel(**shapes.SD35_MEDIUM)) == pytest.approx(2.5, abs=0.3)
    assert parameters(lambda: WanTransformer3DModel(**shapes.WAN_1_3B)) == pytest.approx(1.4, abs=0.1)


def test_all_parts_together_take_at_most_25_minutes():
    assert sum(parts.LIMITS[name] for name in parts.PARTS) <= 25 * 60


def test_sglang_is_skipped_in_one_line_where_it_is_missing(tmp_path, monkeypatch):
    def missing():
        raise ConfigError("engine_type sglang needs the package sglang: pip install it")

    monkeypatch.setattr("lightrft_visual.plugins.sglang.arguments.require_package", missing)
    (row,) = parts.engines_sglang(tmp_path, "tiny")
    assert row == ("skipped", "engine_type sglang needs the package sglang: pip install it")


def test_the_runs_of_a_part_that_is_cut_off_end_too(tmp_path, monkeypatch):
    """They would keep the card's memory from the next part."""
    monkeypatch.setattr(check, "HERE", tmp_path)
    alive = tmp_path / "alive"
    run = f"import pathlib, time\nwhile True:\n    pathlib.Path({str(alive)!r}).touch()\n    time.sleep(0.05)"
    (tmp_path / "parts.py").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {run!r}])\n")
    monkeypatch.setitem(parts.LIMITS, "slow", 1)
    assert "cut off after 1 s" in check.run_part("slow", tmp_path, "real")["error"]
    for _ in polls(30, 0.3):  # on a busy machine it may be dying still
        alive.unlink(missing_ok=True)
        time.sleep(0.3)
        if not alive.exists():
            return
    raise AssertionError("the run goes on")


def test_a_part_that_was_tried_on_tiny_shapes_is_still_to_be_done_on_a_card(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "HERE", tmp_path)
    (tmp_path / "parts.py").write_text("")
    monkeypatch.setitem(parts.LIMITS, "quick", 60)
    check.run_part("quick", tmp_path, "tiny")
    assert check.done_before(tmp_path / "quick.json", "tiny") and not check.done_before(tmp_path / "quick.json", "real")
    assert not check.done_before(tmp_path / "other.json", "tiny")


def test_a_part_that_is_cut_off_keeps_its_rows_and_the_others_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "HERE", tmp_path)
    rows = """'[["a", "1"]]'"""
    script = (
        f"import sys, pathlib, time\npathlib.Path(sys.argv[2], 'slow.rows.json').write_text({rows})\ntime.sleep(60)\n"
    )
    (tmp_path / "parts.py").write_text(script)
    monkeypatch.setitem(parts.LIMITS, "slow", 5)
    result = check.run_part("slow", tmp_path, "real")
    assert result["rows"] == [["a", "1"]] and "cut off after 5 s" in result["error"]
    (tmp_path / "parts.py").write_text("raise SystemExit(3)\n")
    assert "exit code 3" in check.run_part("slow", tmp_path, "real")["error"]
    assert json.loads((tmp_path / "slow.json").read_text())["part"] == "slow"
    lines = check.table([result], {"device": "some card", "torch": "2"}).splitlines()
    assert lines[0] == "Device: some card. torch 2." and "| slow | a | 1 |" in lines
