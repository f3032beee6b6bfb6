"""Every number of a reward is reported once."""

from __future__ import annotations

import torch
from lightrft_visual.trainer.stage_metrics import add_stage_metrics, over_rounds

from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.rewards.batch import RewardOutput


def test_components_are_told_per_sample_and_counts_by_the_call():
    def some(prompts):
        return [None, 1.0, 2.0], {"length": [3.0, 4.0, 5.0]}

    output = RewardComputationEngine(custom_reward_func=some).score_media(["a", "b", "c"])
    assert output.metrics["reward/some"] == 1.5
    counts = output.counts
    assert counts.pop("reward/time") > 0
    assert counts == {"reward/some/failures": 0, "reward/some/not_applicable": 1, "reward/invalid_share": 1 / 3}


def test_rounds_of_sampling_make_one_step():
    rounds = [
        {"reward/a/failures": 1.0, "reward/invalid_share": 0.5, "reward/time": 2.0},
        {"reward/a/failures": 2.0, "reward/invalid_share": 0.0, "reward/time": 3.0, "reward/b/not_applicable": 4.0},
    ]
    step = over_rounds(rounds)
    assert step == {
        "reward/a/failures": 3, "reward/invalid_share": 0.25, "reward/time": 5, "reward/b/not_applicable": 4,
    }  # fmt: skip
    metrics = MetricsAccumulator()
    metrics.add_mean("reward/a", torch.tensor([1.0, 3.0]))
    add_stage_metrics(metrics, step)
    assert metrics.reduce() == {**step, "reward/a": 2.0}
    assert RewardOutput(torch.ones(1), {"a": torch.ones(1)}, torch.ones(1).bool(), {"reward/a": 1.0}).counts == {}
