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
    """A source whose batches are the numbers from 1 on."""

    def __init__(self):
        self.at = 0

    def next(self, step: int) -> int:
        self.at += 1
        self.epoch = self.at / 4
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def ahead_of(begun: list, state=None, max_staleness: int = 2) -> RolloutsAhead:
    """Two batches ahead of a source, with an engine that holds a state."""
    held = [state]
    engine = SimpleNamespace(state_dict=lambda: held[-1], load_state_dict=held.append)
    return RolloutsAhead(Counting(), AsyncConfig(max_staleness, batches_ahead=2), engine, begun.append)


def test_batches_come_in_order_and_none_is_lost_by_a_resume():
    begun, again, given = [], [], []
    ahead = ahead_of(begun, "what is drawn")
    assert ahead.state_dict() == {"at": 0, "engine": "what is drawn", "max_staleness": 2}
    for step in range(5):
        given.append(ahead.next(step, 5 - step))
        assert ahead.state_dict()["at"] == given[-1]  # a resumed run takes the batch behind it first
        assert ahead.epoch == given[-1] / 4  # and what is begun behind it is not done
        assert begun == list(range(1, min(5, step + 3) + 1))
        if step == 0:
            resumed = ahead_of(again)
            resumed.load_state_dict(ahead.state_dict())
    assert given == [1, 2, 3, 4, 5] == begun  # no batch is begun that no step will take
    assert resumed.engine.state_dict() == "what is drawn" and resumed.next(1, 4) == 2 and again == [2, 3, 4]


def test_a_state_that_is_gone_back_to_holds_no_batch_that_was_begun_later():
    ahead = ahead_of([])
    best = ahead.state_dict()
    for step in range(4):
        ahead.next(step, 9)
    ahead.load_state_dict(best)
    assert ahead.state_dict()["at"] == 0 and ahead.next(0, 9) == 1


@pytest.mark.parametrize(("before", "drawn_again"), [(3, True), (2, False), (1, False)])
def test_what_a_run_that_allowed_older_tokens_has_drawn_is_drawn_again(before, drawn_again):
    state = ahead_of([], "what is drawn", before).state_dict()
    resumed = ahead_of([], max_staleness=2)
    resumed.load_state_dict(state)
    assert resumed.engine.state_dict() == ({} if drawn_again else "what is drawn")


def test_a_run_that_allowed_no_older_tokens_is_resumed_as_one_that_does():
    resumed = ahead_of([])
    resumed.load_state_dict(Counting().state_dict())
    assert resumed.next(0, 9) == 1


def test_settings():
    split = DistributedConfig(placement="split")
    config = RunConfig(distributed=split, asynchronous=AsyncConfig(max_staleness=2))
    assert config.asynchronous.ahead == 2 and config.asynchronous.behaviour(config.algorithm.corrects_rollouts)
    corrected = AlgorithmConfig(tis_mode="token")
    config = RunConfig(distributed=split, algorithm=corrected, asynchronous=AsyncConfig(max_staleness=1))
    assert not config.asynchronous.behaviour(config.algorithm.corrects_rollouts)
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
    hook, ahead = SimpleNamespace(on_prompts=change), StalenessHook(1, SimpleNamespace())
    change.__qualname__ = "Mine.on_prompts"
    assert Hooks([ahead, SimpleNamespace(on_prompts=lambda own: [*own])]).on_prompts(requests) == requests
    with pytest.raises(ConfigError, match=r"Mine\.on_prompts changes prompts, and with max_staleness"):
        Hooks([ahead, hook]).on_prompts(requests)
    assert Hooks([hook]).on_prompts(requests)


def at_step_5(most: int) -> StalenessHook:
    made = StalenessHook(most, SimpleNamespace(measured=lambda: {"rollout_wait": 0.5}))
    made.setup(SimpleNamespace(step=lambda: 5))
    return made


def experience(versions, mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    return SimpleNamespace(token_versions=torch.tensor(versions), action_mask=mask, info={}, is_packed=False)


@pytest.mark.parametrize(
    "made, most, mean, largest, shares",
    [
        pytest.param(experience([[5, 4], [2, -1]], [[1, 1], [1, 0]]), 2, 4 / 3, 3, [1 / 3] * 3, id="by token"),
        pytest.param(SimpleNamespace(policy_version=torch.tensor([5, 4, 3])), 1, 1.0, 2, [1 / 3, 2 / 3], id="whole"),
    ],
)
def test_ages_of_tokens_and_of_samples_that_one_policy_drew_as_a_whole(made, most, mean, largest, shares):
    found = at_step_5(most).on_experience(StepData([made])).metrics.reduce()
    assert found["staleness_mean"] == pytest.approx(mean) and found["staleness_max"] == largest
    assert [found[f"staleness_{age}"] for age in range(most + 1)] == pytest.approx(shares)


def test_only_tokens_of_the_present_policy_are_compared():
    each = experience([[5, 4], [5, -1]], [[1, 1], [1, 0]])
    assert comparable(each, each.action_mask, 5).tolist() == [[True, False], [True, False]]
    assert comparable(each, each.action_mask).tolist() == each.action_mask.tolist()


def test_responses_that_are_too_old_are_left_out_and_counted():
    rollouts = Rollouts([SimpleNamespace(policy_version=version, valid=True) for version in (5, 4, 3, 2)])
    stale = at_step_5(most=1)
    assert stale.on_scores(rollouts) is rollouts
    assert [each.valid for each in rollouts] == [True, True, False, False]
    assert stale.metrics() == {"dropped_stale_share": 0.5, "rollout_wait": 0.5}
