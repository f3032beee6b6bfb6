"""Selective sample replay: what is replaced, what is drawn, and that the number of ranks does not matter."""

import time

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from replay_cases import text_item, vision_item

import lightrft_visual.trainer.features.selective_replay as selective_replay
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.runtime.checkpoint.state import load_state, save_state
from lightrft_visual.trainer.features.selective_replay import SelectiveReplay, advantage_size

STEPS = [1.0, -2.0, 0.5, 3.0, 0.0, 0.1], [0.0, 0.0, 1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]


def sample(number: int, advantage: float, version: int):
    return text_item(
        length=4 + number % 3, action_log_probs=torch.full((2,), -1.0 - number),
        advantages=torch.full((2,), advantage), sample_id=torch.tensor(number), group_id=torch.tensor(number // 2),
        policy_version=torch.tensor(version), valid=torch.tensor(True),
    )  # fmt: skip


def filled_buffer(advantages: list[float], start: int = 0, version: int = 0, rank: int = 0, ranks: int = 1, **info):
    """info: a list with a value of each sample."""
    buffer = NaiveReplayBuffer(2)
    for place, advantage in enumerate(advantages):
        if place % ranks == rank:
            buffer.items.append(sample(start + place, advantage, version))
            buffer.items[-1].info = {name: torch.tensor(values[place]) for name, values in info.items()}
    return buffer


def refilled(replay: SelectiveReplay, step: int, rank: int = 0, ranks: int = 1):
    """The buffer of a step, and how many of its samples were replaced."""
    buffer = filled_buffer(STEPS[step], 6 * step, step, rank, ranks)
    return buffer, len(replay.refill(buffer, step)[1])


def replayed() -> dict:
    """Over two steps, each rank with every second sample."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replay, small = (SelectiveReplay(capacity=capacity, seed=0) for capacity in (100, 4))
    for step in (0, 1):
        buffer, replaced = refilled(replay, step, rank, ranks)
        refilled(small, step, rank, ranks)
    told = {"replaced": replaced, "numbers": [int(item.sample_id) for item in buffer]}
    return told | {"kept": [int(item.sample_id) for item in small.kept], "state": small.state_dict()}


def numbers(items) -> list[int]:
    return [int(item.sample_id) for item in items]


def test_samples_without_advantage_give_their_places_to_kept_ones():
    replay = SelectiveReplay(capacity=8, seed=0)
    first = filled_buffer([1.0, 0.0, -2.0, 0.0, 0.0, 0.5])
    assert replay.refill(first, step=0)[1] == []  # nothing is kept yet
    assert numbers(first) == [0, 1, 2, 3, 4, 5] and numbers(replay.kept) == [0, 2, 5]
    second = filled_buffer([0.0, 0.0, 3.0, 0.0, 0.0], start=6, version=1)
    assert replay.refill(second, step=1) == (5, [0, 0, 0])
    assert sorted(numbers(second)) == [0, 2, 5, 8, 10]  # one lacks a stand-in and stays
    assert numbers(second)[2] == 8
    assert numbers(replay.kept) == [0, 2, 5, 8]  # a replayed sample is not kept twice
    assert [item.info["replayed"] for item in second.items] == [item.sample_id < 6 for item in second.items]
    stand_in = second[numbers(second).index(2)]
    assert stand_in.action_log_probs.tolist() == sample(2, -2.0, 0).action_log_probs.tolist()  # of the old policy


def test_what_kl_and_whitening_add_to_the_tokens_is_no_advantage_of_the_group():
    replay = SelectiveReplay(capacity=8, seed=0)
    for step, compared in enumerate(([1.0, -1.0], [0.0, 2.0])):
        buffer = filled_buffer([0.9, -1.1], start=2 * step, group_advantage=compared)
        _, versions = replay.refill(buffer, step)
    assert len(versions) == 1 and numbers(buffer)[1] == 3 and numbers(buffer)[0] < 2
    assert numbers(replay.kept) == [0, 1, 3]


def test_the_oldest_go_first_and_invalid_ones_never_stay():
    replay = SelectiveReplay(capacity=2, seed=0)
    buffer = filled_buffer([1.0, 1.0, 1.0, 1.0])
    buffer.items[3].valid = torch.tensor(False)
    replay.refill(buffer, step=0)
    assert numbers(replay.kept) == [1, 2]
    masked = text_item(advantages=torch.tensor([1.0, 9.0]), action_mask=torch.tensor([True, False]))
    assert advantage_size(masked) == 1.0


def test_samples_that_the_loss_masks_as_cut_off_are_neither_kept_nor_in_the_way():
    replay = SelectiveReplay(capacity=8, seed=0, mask_truncated=True)
    for step in (0, 1):
        buffer = filled_buffer([1.0, -1.0], start=2 * step, truncated=[False, True])
        _, versions = replay.refill(buffer, step)
    assert len(versions) == 1 and numbers(buffer) == [2, 0] and numbers(replay.kept) == [0, 2]
    before = SelectiveReplay(capacity=8, seed=0)
    before.refill(filled_buffer([1.0, -1.0], truncated=[False, True]), step=0)
    replay.load_state_dict(before.state_dict())  # of a run that did not mask them
    assert numbers(before.kept) == [0, 1] and numbers(replay.kept) == [0]


def test_answers_stand_in_for_answers_and_drawings_for_drawings():
    replay = SelectiveReplay(capacity=2, seed=0)
    replay.refill(filled_buffer([1.0, 2.0, 3.0, 4.0, 5.0], loss_part=[1, 1, 1, 0, 0]), step=0)
    assert numbers(replay.kept) == [1, 2, 3, 4]  # the last two of each kind, in the order they came
    buffer = filled_buffer([0.0] * 5, start=5, loss_part=[0, 1, 0, 0, 0])
    assert len(replay.refill(buffer, step=1)[1]) == 3 and numbers(buffer)[1] in (1, 2)
    assert {*numbers(buffer)} & {0, 1, 2, 3, 4} == {numbers(buffer)[1], 3, 4}


def test_the_draw_is_in_proportion_to_the_advantage():
    """P(j) = |A_j| / sum_k |A_k|, for a single place."""
    counts, steps, replay = [0, 0, 0], 700, SelectiveReplay(capacity=3, seed=1)
    replay.refill(filled_buffer([1.0, -2.0, 7.0]), step=0)
    for step in range(steps):
        buffer = filled_buffer([0.0], start=3)
        replay.refill(buffer, step)
        counts[numbers(buffer)[0]] += 1
    assert [count / steps for count in counts] == pytest.approx([0.1, 0.2, 0.7], abs=0.04)


def test_the_kept_samples_survive_a_checkpoint(tmp_path):
    replay = SelectiveReplay(capacity=4, seed=0)
    buffer = filled_buffer([1.0, -1.0])
    extra = {"sample_id": torch.tensor(7), "policy_version": torch.tensor(0)}
    buffer.items.append(vision_item(images=2, advantages=torch.tensor([0.5, 0.5]), **extra))
    replay.refill(buffer, step=0)
    save_state(tmp_path / "state.safetensors", replay.state_dict())
    again = SelectiveReplay(capacity=4, seed=0)
    again.load_state_dict(load_state(tmp_path / "state.safetensors"))
    assert len(again.kept) == 3
    for ours, theirs in zip(replay.kept, again.kept):
        assert torch.equal(ours.sequences, theirs.sequences) and torch.equal(ours.advantages, theirs.advantages)
    assert torch.equal(replay.kept[2].pixel_values, again.kept[2].pixel_values)


def test_a_state_that_no_checkpoint_takes_is_not_made_and_a_later_one_is_as_of_when_it_was_taken(monkeypatch):
    made, make = [], selective_replay.items_to_state
    monkeypatch.setattr(selective_replay, "items_to_state", lambda items: made.append(len(items)) or make(items))
    replay = SelectiveReplay(capacity=4, seed=0)
    replay.refill(filled_buffer([1.0, -1.0]), step=0)
    state = replay.state_dict()
    replay.refill(filled_buffer([0.0, 3.0, 2.0, 5.0], start=2, version=1), step=1)  # draws one, drops one
    assert made == [] and len(replay.kept) == 4 and numbers(replay.kept) != [0, 1]
    again = SelectiveReplay(capacity=4, seed=0)
    again.load_state_dict(state)
    assert made == [2] and numbers(again.kept) == [0, 1]
    assert [bool(item.info["replayed"]) for item in again.kept] == [False, False]


def test_time_to_drop_the_oldest_is_linear_in_what_is_kept():
    replay = SelectiveReplay(capacity=60_000, seed=0, kept=[sample(0, 1.0, 0)] * 60_000)
    ages = [(0, (0, number)) for number in range(60_000)]
    started = time.process_time()
    replay._keep_newest(ages)
    assert time.process_time() - started < 2.0  # 5 s where each of them copies all ages
    assert len(replay.kept) == 60_000


@pytest.mark.slow
def test_two_ranks_draw_and_keep_what_one_would():
    ranks = on_ranks(replayed)
    alone, small = SelectiveReplay(capacity=100, seed=0), SelectiveReplay(capacity=4, seed=0)
    for step in (0, 1):
        whole, replaced = refilled(alone, step)
        refilled(small, step)
    assert replaced == 4 and all(each["replaced"] == 4 for each in ranks)
    assert sorted(ranks[0]["numbers"] + ranks[1]["numbers"]) == sorted(numbers(whole))
    assert [len(each["numbers"]) for each in ranks] == [3, 3]
    assert sorted(ranks[0]["kept"] + ranks[1]["kept"]) == numbers(small.kept) == [3, 5, 8, 11]

    joined = SelectiveReplay(capacity=4, seed=0)
    joined.load_state_dict(joined.state_of_ranks([each["state"] for each in ranks]))
    assert [sorted(numbers(refilled(each, 2)[0])) for each in (joined, small)] == [[3, 5, 8, 11, 15, 17]] * 2
    assert sorted(numbers(joined.kept)) == numbers(small.kept) == [5, 8, 11, 15]
