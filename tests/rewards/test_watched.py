"""Reward weights that a file changes during a run."""

from __future__ import annotations

import logging
import os

import pytest
from reward_rollouts import make_samples

from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.engine import RewardComputationEngine

RECIPE = {"*": [["rule", "exact", 1.0], ["rule", "format", 0.5]]}


def write(path, text: str, turn: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(turn, turn))


def engine(path, **arguments) -> RewardComputationEngine:
    return RewardComputationEngine(
        reward_recipe=RECIPE, config=RewardConfig(reward_weights_file=str(path)), **arguments
    )


def score(made: RewardComputationEngine) -> list[float]:
    """A right answer without form, and a wrong one with it."""
    responses = ["3", "<think> so </think> <answer> 4 </answer>"]
    return made.compute_rewards([make_samples(responses, references=["3", "3"])]).score.tolist()


def test_weights_follow_the_file_from_the_next_refresh_on(tmp_path):
    path = tmp_path / "weights.yaml"
    write(path, "format: 2.0\n", 1)
    made = engine(path)
    assert score(made) == [1.0, 2.0]
    write(path, '{"exact": 0, "format": 0.25}', 2)
    assert score(made) == [1.0, 2.0]
    assert made.refresh_weights() == {"exact": 0.0, "format": 0.25}
    assert score(made) == [0.0, 0.25]
    write(path, "{}", 3)
    made.refresh_weights()
    assert score(made) == [1.0, 0.5]


def test_a_wrong_change_is_said_and_the_last_good_weights_stay(tmp_path, caplog):
    path = tmp_path / "weights.yaml"
    write(path, "format: 2.0\n", 1)
    made = engine(path)
    for turn, (text, told) in enumerate(
        [
            ("fromat: 1", "did you mean 'format'"),
            ("format: much", "not a number"),
            ("format: .nan", "not a number"),
            ("format: 1" + 400 * "0", "not a number"),
            ("format: -1e40", "within ±1e+06"),
            ('{"format": 1', "weights.yaml"),
            ("- 1", "a mapping"),
            (" \n", "is empty"),
        ],
        start=2,
    ):
        write(path, text, turn)
        with caplog.at_level(logging.WARNING):
            assert made.refresh_weights() == {"format": 2.0}
        assert told in caplog.text
    path.unlink()
    assert made.refresh_weights() == {"format": 2.0} and "is no file" in caplog.text


def test_a_missing_or_wrong_file_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="is no file; write one"):
        engine(tmp_path / "none.yaml")
    write(tmp_path / "weights.yaml", "exakt: 1", 1)
    with pytest.raises(ConfigError, match="no component 'exakt'; did you mean 'exact'"):
        engine(tmp_path / "weights.yaml")
