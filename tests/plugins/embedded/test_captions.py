"""Which captions an embedded run trains on and is evaluated on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightrft_visual.config.diffusion import DiffusionDataConfig, DiffusionRunConfig
from lightrft_visual.config.load import load_config
from lightrft_visual.config.spellings import DIFFUSION_PRESET
from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.embedded.resolve import place_captions


def resolved(*argv: str) -> DiffusionDataConfig:
    config = load_config(DiffusionRunConfig, list(argv), preset=DIFFUSION_PRESET)
    place_captions(config)
    return config.data


def captions(path: str) -> set[str]:
    return {json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()}


@pytest.mark.parametrize("pairs", ([], ["--diffusion_algorithm", "diffusion_dpo", "--pair_data", "embedded"]))
def test_tuning_neither_trains_on_nor_evaluates_the_test_captions(
    pairs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    reported, tuned = resolved(*pairs), resolved(*pairs, "--eval_split", "dev")
    test, dev, trained = captions(reported.eval_data), captions(tuned.eval_data), captions(tuned.prompt_data)
    assert (len(test), len(dev), len(trained)) == (6, 6, 12) and not test & (dev | trained) and not dev & trained
    assert captions(reported.prompt_data) == dev | trained
    with pytest.raises(ConfigError, match="eval_split is 'train'"):
        resolved(*pairs, "--eval_split", "train")


def test_a_file_of_ones_own_is_evaluated_with_any_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRFT_CACHE", str(tmp_path))
    data = resolved("--eval_data", "mine.jsonl", "--eval_split", "train")
    assert data.eval_data == "mine.jsonl" and len(captions(data.prompt_data)) == 18
