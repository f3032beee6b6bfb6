"""How old the tokens of rollouts are, and which rollouts are too old to train on."""

from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.experience.rollouts import Rollouts
from lightrft_visual.trainer.features.rollouts_ahead import StalenessHook
from lightrft_visual.trainer.hooks import StepData
from lightrft_visual.trainer.vl.updates import comparable


def hook(most: int, step: int = 5) -> StalenessHook:
    made = StalenessHook(most, SimpleNamespace(measured=lambda: {"rollout_wait": 0.5}))
    made.setup(SimpleNamespace(step=lambda: step))
    return made


def experience(versions, mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    return SimpleNamespace(token_versions=torch.tensor(versions), action_mask=mask, info={}, is_packed=False)


def test_ages_of_tokens():
    step = hook(most=2).on_experience(StepData([experience([[5, 4], [2, -1]], [[1, 1], [1, 0]])]))
    found = step.metrics.reduce()
    assert found["staleness_mean"] == pytest.approx(4 / 3) and found["staleness_max"] == 3
    assert [found[f"staleness_{age}"] for age in range(3)] == pytest.approx([1 / 3] * 3)


def test_ages_of_samples_that_one_policy_drew_as_a_whole():
    step = hook(most=1).on_experience(StepData([SimpleNamespace(policy_version=torch.tensor([5, 4, 3]))]))
    found = step.metrics.reduce()
    assert (found["staleness_mean"], found["staleness_max"]) == (1.0, 2.0)
    assert [found[f"staleness_{age}"] for age in range(2)] == pytest.approx([1 / 3, 2 / 3])


def test_only_tokens_of_the_present_policy_are_compared():
    each = experience([[5, 4], [5, -1]], [[1, 1], [1, 0]])
    assert comparable(each, each.action_mask, 5).tolist() == [[True, False], [True, False]]
    assert comparable(each, each.action_mask).tolist() == each.action_mask.tolist()


def test_responses_that_are_too_old_are_left_out_and_counted():
    rollouts = Rollouts([SimpleNamespace(policy_version=version, valid=True) for version in (5, 4, 3, 2)])
    stale = hook(most=1)
    assert stale.on_scores(rollouts) is rollouts
    assert [each.valid for each in rollouts] == [True, True, False, False]
    assert stale.metrics() == {"dropped_stale_share": 0.5, "rollout_wait": 0.5}
