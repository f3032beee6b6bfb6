"""Rollouts that run ahead: which batches are begun when, what a checkpoint holds, how old tokens are."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.config.placement import AsyncConfig
from lightrft_visual.config.shared import OutputConfig
from lightrft_visual.config.vl import AlgorithmConfig, DistributedConfig, RunConfig, TrainConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import PromptFeatures, Rollouts
from lightrft_visual.trainer.features.rollouts_ahead import RolloutsAhead, StalenessHook
from lightrft_visual.trainer.hooks import Hooks, StepData
from lightrft_visual.trainer.vl.updates import comparable


class Counting:
    """A source whose batches are the numbers from 1 on; notes the steps that it is asked in."""

    def __init__(self):
        self.at, self.steps = 0, []

    def next(self, step: int) -> int:
        self.at += 1
        self.steps.append(step)
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Noting:
    """An engine that holds what it is given."""

    def __init__(self):
        self.state = {"begun": []}

    def note_policy(self, version: int) -> None:
        self.version = version

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_batches_come_in_order_and_none_is_lost_by_a_resume():
    source, begun = Counting(), []
    ahead = RolloutsAhead(source, 2, Noting(), begun.append)
    assert ahead.state_dict() == {"at": 0, "engine": {"begun": []}}
    given = []
    for step in range(5):
        given.append(ahead.next(step, 5 - step))
        assert ahead.state_dict()["at"] == given[-1]  # a resumed run takes the batch behind it first
        assert begun == list(range(1, min(5, step + 3) + 1))
    assert given == [1, 2, 3, 4, 5] and source.at == 5  # no batch is begun that no step will take


def test_a_resumed_source_begins_again_with_the_first_batch_not_handed_out():
    first, again, begun = RolloutsAhead(Counting(), 2, Noting(), [].append), Counting(), []
    first.next(0, 5)
    first.engine.state = {"begun": ["what is drawn of it"]}
    resumed = RolloutsAhead(again, 2, Noting(), begun.append)
    resumed.load_state_dict(first.state_dict())
    assert resumed.engine.state == {"begun": ["what is drawn of it"]}
    assert resumed.next(1, 4) == 2 and begun == [2, 3, 4]


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


def with_other_image(requests):
    requests[0].images = ["other"]
    return requests


@pytest.mark.parametrize(
    "change", [lambda requests: [replace(each) for each in requests], lambda requests: requests[::-1], with_other_image]
)
def test_a_hook_that_changes_prompts_that_are_begun_is_refused_by_its_name(change):
    requests = [PromptFeatures("a", [1], 0, images=["own"]), PromptFeatures("b", [2], 1)]
    hook, ahead = SimpleNamespace(on_prompts=change), StalenessHook(1, Noting())
    change.__qualname__ = "Mine.on_prompts"
    assert Hooks([ahead, SimpleNamespace(on_prompts=lambda own: [*own])]).on_prompts(requests) == requests
    with pytest.raises(ConfigError, match=r"Mine\.on_prompts changes prompts, and with max_staleness"):
        Hooks([ahead, hook]).on_prompts(requests)
    assert Hooks([hook]).on_prompts(requests)


# --- ages of tokens and responses ------------------------------------------------------------------------------------


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
