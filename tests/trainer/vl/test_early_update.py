"""When an update may begin before all rewards are there, in which order, and what ends it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.batches.experience import Experience
from lightrft_visual.config.vl import AlgorithmConfig, RolloutConfig, RunConfig, TrainConfig
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.replay.buffer import NaiveReplayBuffer
from lightrft_visual.replay.plan import MicroBatch
from lightrft_visual.trainer.vl.early_update import LONGEST_REST, EarlyUpdate, early_update_fits, finished_first

REMOTE = SimpleNamespace(streams_all=True)


def config(algorithm=None, **changed) -> RunConfig:
    rollout = RolloutConfig(rollout_batch_size=8, n_samples_per_prompt=4, micro_rollout_batch_size=8)
    train = TrainConfig(train_batch_size=32)
    made = RunConfig(algorithm=AlgorithmConfig(**(algorithm or {})), rollout=rollout, train=train)
    for name, value in changed.items():
        section, setting = name.split("__")
        setattr(getattr(made, section), setting, value)
    return made


def test_one_update_of_advantages_within_groups_may_begin_early():
    assert early_update_fits(config(), REMOTE, ranks=1) and early_update_fits(config(), REMOTE, ranks=2)


@pytest.mark.parametrize(
    "changed",
    [
        {"train__train_batch_size": 16},
        {"train__max_epochs": 2},
        {"train__train_while_scoring": False},
        {"train__freezing_actor_steps": 1},
        {"rollout__dynamic_sampling": True},
        {"rollout__micro_rollout_batch_size": 6},  # a group is cut, and its parts hold others
        {"distributed__sp_size": 2},
        {"data__ask_key": "ask"},
        {"asynchronous__max_staleness": 1},
        *({"algorithm": {name: True}} for name in ("advantages_norm", "reward_running_norm")),
        {"algorithm": {"selective_replay": 64}},
        {"algorithm": {"advantage_estimator": "gdpo"}},
        {"algorithm": {"advantage_estimator": "gae"}},
        {"algorithm": {"init_kl_coef": 0.1, "kl_target": 0.1}},
    ],
)
def test_what_looks_at_the_whole_batch_waits_for_it(changed):
    assert not early_update_fits(config(**changed), REMOTE, ranks=1)


def test_a_scorer_here_and_budgets_of_tokens_on_several_ranks_wait_too():
    assert not early_update_fits(config(), SimpleNamespace(streams_all=False), ranks=1)
    packed = config(train__packing_samples=True, train__max_tokens_per_batch=512)
    assert early_update_fits(packed, REMOTE, ranks=1) and not early_update_fits(packed, REMOTE, ranks=2)


NONE = dict.fromkeys(("base_action_log_probs", "values", "returns", "advantages", "info"))


def filled_buffer(lengths: list[int], **fields) -> NaiveReplayBuffer:
    count, longest = len(lengths), max(lengths)
    mask = torch.arange(longest).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    values = {name: torch.zeros(count, longest) for name in ("action_log_probs", "advantages")}
    buffer = NaiveReplayBuffer(1)
    sequences = torch.ones(count, longest + 1, dtype=torch.long)
    attention = torch.cat([torch.ones(count, 1), mask], dim=1).long()
    buffer.append(
        Experience(sequences=sequences, attention_mask=attention, action_mask=mask, **(NONE | values | fields))
    )
    return buffer


def test_the_longest_responses_come_last_and_fillers_after_them():
    buffer = filled_buffer([3, 1, 2, 2, 4, 1])
    step = [MicroBatch([0], filler=True), MicroBatch([4, 1]), MicroBatch([2]), MicroBatch([3]), MicroBatch([5])]
    assert [each.indices for each in finished_first(buffer, step)] == [[5], [2], [3], [4, 1], [0]]


class Noting:
    """A policy update that notes what it is asked."""

    def __init__(self):
        self.done: list = []

    def accumulate(self, buffer, batch, index, kl_coef):
        self.done.append(index)
        return f"share {index}"

    def discard(self, buffer, batch, kl_coef):
        self.done.append("discarded")


def batch_of(buffer: NaiveReplayBuffer) -> SimpleNamespace:
    masks = [torch.ones(1, 1, dtype=torch.bool)] * len(buffer)
    micro_batches = [MicroBatch([index]) for index in range(len(buffer))]
    return SimpleNamespace(micro_batches=micro_batches, token_masks=masks, policy_masks=None, kinds=[])


class Step:
    """Four samples, each a group; numbers of those whose reward is not valid."""

    def __init__(self, invalid=()):
        experience = NONE | dict(
            sequences=torch.ones(1, 2, dtype=torch.long), action_mask=torch.ones(1, 1, dtype=torch.bool)
        )
        experience["action_log_probs"] = torch.zeros(1, 1)
        self.experiences = [Experience(**(experience | {"attention_mask": None})) for _ in range(4)]
        self.early, self.invalid = SimpleNamespace(answered=lambda first, last, seconds: True), invalid

    def with_advantages(self, parts, samples):
        made = [self.experiences[part] for part in parts]
        for part, experience in zip(parts, made):
            experience.advantages = torch.full((1, 1), float(part))
        return None if set(samples) & set(self.invalid) else made


def early_update(stopping=lambda: False) -> EarlyUpdate:
    timer = SimpleNamespace(phase=lambda name: nullcontext())
    return EarlyUpdate(Noting(), lambda: NaiveReplayBuffer(1), batch_of, stopping, timer, group_size=1)


def final(advantages=(0.0, 1.0, 2.0, 3.0), valid=True) -> NaiveReplayBuffer:
    values = torch.tensor(advantages).unsqueeze(1)
    return filled_buffer([1] * 4, advantages=values, valid=torch.tensor([valid] * 4))


def test_all_micro_batches_but_the_last_one_are_trained_and_kept():
    early, metrics = early_update(), MetricsAccumulator()
    early.begin(Step(), 0.0)
    buffer = final()
    assert early.take(buffer, batch_of(buffer), 0.0, metrics) == ["share 0", "share 1", "share 2"]
    assert early.update.done == [0, 1, 2] and metrics.reduce()["trained_while_scoring"] == 0.75
    assert early.take(buffer, batch_of(buffer), 0.0, metrics) == []  # each is taken once


@pytest.mark.parametrize("advantages, kl_coef", [((0.0, 1.5, 2.0, 3.0), 0.0), ((0.0, 1.0, 2.0, 3.0), 0.1)])
def test_other_numbers_discard_what_was_trained_and_end_it(advantages, kl_coef, caplog):
    early, metrics = early_update(), MetricsAccumulator()
    early.begin(Step(), 0.0)
    buffer = final(advantages)
    assert early.take(buffer, batch_of(buffer), kl_coef, metrics) == []
    assert early.update.done[-1] == "discarded" and metrics.reduce()["discarded_while_scoring"] == 0.75
    assert "changed with those of others" in caplog.text
    early.begin(Step(), 0.0)
    assert early.begun is None


def test_invalid_rewards_end_it_for_more_and_more_steps():
    early, waits = early_update(), []
    for _ in range(8):
        early.begin(Step(invalid=[2]), 0.0)
        assert early.update.done[-2:] == [0, 1]
        buffer = final(valid=False)
        assert early.take(buffer, batch_of(buffer), 0.5, MetricsAccumulator()) == []
        count = 0
        while early.rest > 0:
            early.begin(Step(), 0.0)
            assert early.begun is None
            count += 1
        waits.append(count)
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_REST, LONGEST_REST]


def test_who_is_asked_to_stop_does_not_wait_for_replies():
    early, step = early_update(stopping=lambda: True), Step()
    step.early = SimpleNamespace(answered=lambda first, last, seconds: False)
    early.begin(step, 0.0)
    assert early.update.done == [] and early.begun.shares == []


def test_samples_that_change_ranks_end_it_for_some_steps():
    early = early_update()

    def moving(buffer):
        buffer.items = buffer.items[1:] + buffer.items[:1]
        return batch_of(buffer)

    early.plan = moving
    early.begin(Step(), 0.0)
    assert early.begun is None and early.update.done == [] and (early.rest, early.next_rest) == (1, 2)
