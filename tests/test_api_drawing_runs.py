"""Trainers for Python of each kind take a real step or two; diffusion pipelines are given as objects."""

from pathlib import Path

from forked import run_alone

TRAINED = ("FlowGRPOTrainer", "DDPOTrainer", "RewardFLTrainer", "DiffusionDPOTrainer", "PPOTrainer")


def test_trainers_take_real_steps_and_their_checkpoints_are_used(tmp_path, cache_root):
    told = run_alone(Path(__file__).with_name("api_steps.py"), tmp_path, limit=400).splitlines()
    assert {f"{name}: trained" for name in TRAINED} <= set(told)
