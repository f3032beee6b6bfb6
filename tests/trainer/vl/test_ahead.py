"""Rollouts that run ahead: which batches are begun when, what a checkpoint holds, how old tokens are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightrft_visual.trainer.vl.ahead import RolloutsAhead, add_staleness, leave_out_stale

from lightrft_visual.config.placement import AsyncConfig
from lightrft_visual.config.shared import OutputConfig
from lightrft_visual.config.vl import AlgorithmConfig, DistributedConfig, RunConfig, TrainConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.trainer.vl.updates import comparable


def test_batches_come_in_order_and_none_is_lost_by_a_resume():
    sampler, begun = {"at": 0}, []

    def take():
        sampler["at"] += 1
        return sampler["at"]

    ahead = RolloutsAhead(2, take, lambda: dict(sampler), begun.append)
    assert ahead.state_now() == {"at": 0}
    given = []
    for step in range(5):
        given.append(ahead.next(5 - step))
        assert ahead.state_now() == {"at": given[-1]}  # a resumed run takes the batch behind it first
        assert begun == list(range(1, min(5, step + 3) + 1))
    assert given == [1, 2, 3, 4, 5] and sampler["at"] == 5  # no batch is begun that no step will take


def experience(versions, mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    return SimpleNamespace(token_versions=torch.tensor(versions), action_mask=mask, info={}, is_packed=False)


def test_ages_of_tokens():
    metrics = MetricsAccumulator()
    add_staleness(metrics, [experience([[5, 4], [2, -1]], [[1, 1], [1, 0]])], version=5, most=2)
    found = metrics.reduce()
    assert found["staleness_mean"] == pytest.approx(4 / 3) and found["staleness_max"] == 3
    assert [found[f"staleness_{age}"] for age in range(3)] == pytest.approx([1 / 3] * 3)


def test_only_tokens_of_the_present_policy_are_compared():
    each = experience([[5, 4], [5, -1]], [[1, 1], [1, 0]])
    assert comparable(each, each.action_mask, 5).tolist() == [[True, False], [True, False]]
    assert comparable(each, each.action_mask).tolist() == each.action_mask.tolist()


def test_responses_that_are_too_old_are_left_out_and_counted():
    rollouts = [SimpleNamespace(policy_version=version, valid=True) for version in (5, 4, 3, 2)]
    assert leave_out_stale(rollouts, version=5, most=1) == {"dropped_stale_share": 0.5}
    assert [each.valid for each in rollouts] == [True, True, False, False]


def test_settings():
    split = DistributedConfig(placement="split")
    config = RunConfig(distributed=split, asynchronous=AsyncConfig(max_staleness=2))
    assert config.asynchronous.ahead == 2 and config.asynchronous.stale_correction == "behaviour"
    corrected = AlgorithmConfig(tis_mode="token")
    config = RunConfig(distributed=split, algorithm=corrected, asynchronous=AsyncConfig(max_staleness=1))
    assert config.asynchronous.stale_correction == "none"
    with pytest.raises(ConfigError, match="add --placement split"):
        RunConfig(asynchronous=AsyncConfig(max_staleness=1))
    both = AsyncConfig(max_staleness=1, stale_correction="behaviour")
    with pytest.raises(ConfigError, match="use one of them"):
        RunConfig(distributed=split, algorithm=corrected, asynchronous=both)
    with pytest.raises(ConfigError, match="belong to a max_staleness above 0"):
        AsyncConfig(batches_ahead=3)
    kept = {"train": TrainConfig(enable_ema=True), "output": OutputConfig(eval_ema=False)}
    RunConfig(distributed=split, asynchronous=AsyncConfig(max_staleness=1), **kept)  # an average may be kept beside it
