"""Records of samples, and which of them are shown."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightrft_visual.batches.samples import Samples, SamplesVL
from lightrft_visual.observe.rollouts import (
    best_and_worst,
    gather_records,
    pick_random,
    records_from_media,
    records_from_samples,
    score,
    select,
)


def samples(kind=Samples, **more):
    return kind(
        sequences=torch.zeros(2, 5, dtype=torch.long),
        attention_mask=torch.ones(2, 5, dtype=torch.long),
        action_mask=torch.tensor([[True, True, False], [True, False, False]]),
        group_ids=torch.tensor([7, 7]),
        sample_ids=torch.tensor([14, 15]),
        truncated=torch.tensor([False, True]),
        prompts=["p", "q"],
        responses=["r", "s"],
        labels=["a", None],
        references=["1", 2],
        metadata=[{}, {}],
        rewards=torch.tensor([0.5, 1.0]),
        reward_valid=torch.tensor([True, False]),
        reward_metrics={"exact": torch.tensor([0.0, 1.0])},
        **more,
    )


def test_a_record_for_each_sample():
    first, second = records_from_samples(samples())
    assert first == {
        "prompt": "p", "response": "r", "reward": 0.5, "components": {"exact": 0.0}, "reference": "1", "label": "a",
        "group_id": 7, "sample_id": 14, "response_length": 2, "truncated": False, "valid": True,
    }  # fmt: skip
    assert second["truncated"] and not second["valid"] and second["reference"] == 2
    assert score(first) == 0.5 and score(second) is None


def test_pictures_come_with_their_sample():
    image = Image.new("RGB", (2, 2))
    first, second = records_from_samples(samples(SamplesVL, raw_images=[[image, image], []]))
    assert first["images"] == [image, image] and "images" not in second and "videos" not in first


def test_generated_media():
    rewards = torch.tensor([0.25, 0.75])
    media = [torch.rand(3, 4, 4), torch.rand(3, 5, 4, 4)]
    still, moving = records_from_media(
        ["a", "b"], media, rewards, {"ocr": rewards}, valid=torch.tensor([True, False]), group_ids=torch.tensor([3, 4])
    )
    assert still["images"][0] is media[0] and still["components"] == {"ocr": 0.25} and still["group_id"] == 3
    assert moving["videos"][0] is media[1] and score(moving) is None


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, None, float("nan")]), max_size=20)


@given(rewards=REWARDS, count=st.integers(1, 5))
def test_best_and_worst_are_apart(rewards, count):
    records = [{"reward": reward, "sample_id": index} for index, reward in enumerate(rewards)]
    best, worst = best_and_worst(records, count)
    valid = [score(record) for record in records if score(record) is not None]
    assert not {r["sample_id"] for r in best} & {r["sample_id"] for r in worst}
    assert len(best) <= count and len(worst) <= count
    if valid:
        assert score(best[0]) == max(valid)
        assert all(score(record) < max(valid) for record in worst)
    if worst:
        assert score(worst[0]) == min(valid)


@given(rewards=REWARDS, count=st.integers(1, 8))
def test_a_selection_has_no_repeats_and_the_right_size(rewards, count):
    records = [{"reward": reward, "sample_id": index} for index, reward in enumerate(rewards)]
    chosen = [record["sample_id"] for record in select(records, count, seed=3)]
    assert len(chosen) == len(set(chosen)) == min(count, len(records))
    assert chosen == [record["sample_id"] for record in select(records, count, seed=3)]


def test_random_picks_keep_their_order_and_depend_on_the_seed():
    records = [{"sample_id": index} for index in range(50)]
    picks = {seed: [record["sample_id"] for record in pick_random(records, 5, seed)] for seed in (1, 2)}
    assert picks[1] == sorted(picks[1]) and picks[1] != picks[2]


@pytest.mark.parametrize("count", [1, 4, 100])
def test_gathering_in_one_process_selects(count):
    records = [{"reward": float(index), "sample_id": index} for index in range(10)]
    assert len(gather_records(records, count, run_seed=1, step=2)) == min(count, 10)
