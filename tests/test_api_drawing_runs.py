"""Trainers for Python of each kind take a real step or two; diffusion pipelines are given as objects."""

from pathlib import Path

import pytest
from forked import run_alone

SCRIPT = Path(__file__).with_name("api_steps.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory, cache_root) -> list[str]:
    return run_alone(SCRIPT, tmp_path_factory.mktemp("steps"), limit=400).splitlines()


@pytest.mark.parametrize(
    "name", ["FlowGRPOTrainer", "DDPOTrainer", "RewardFLTrainer", "DiffusionDPOTrainer", "PPOTrainer"]
)
def test_trainer_takes_real_steps(told, name):
    assert f"{name}: trained" in told


@pytest.mark.parametrize(
    "fact",
    [
        "a numbered checkpoint draws what its export draws",
        "averaged weights are evaluated as the run evaluated them",
        "weights as they are evaluate otherwise",
        "a trainer evaluates before and after it trains",
        "what is closed is let go of",
    ],
)
def test_checkpoints_of_these_runs_are_used(told, fact):
    assert fact in told
