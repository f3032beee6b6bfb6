"""Records of samples, and which of them are shown."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightrft_visual.data.media import to_pil, video_frames
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, release_media
from lightrft_visual.observe import recorder as rollouts_module
from lightrft_visual.observe.recorder import (
    best_and_worst,
    gather_records,
    packed,
    pick_random,
    records_from_media,
    records_from_rollouts,
    score,
    select,
)


def rollouts(images=()) -> list[Rollout]:
    first = PromptFeatures("p", [1, 2], group_id=7, reference="1", label="a", images=list(images))
    second = PromptFeatures("q", [1], group_id=7, reference=2)
    return [
        Rollout(first, [5, 6], None, "r", False, 14, reward=0.5, components={"exact": 0.0}),
        Rollout(second, [5], None, "s", True, 15, reward=1.0, valid=False),
    ]


def test_a_record_for_each_sample_with_its_own_images():
    first, second = records_from_rollouts(rollouts())
    assert first == {
        "prompt": "p", "response": "r", "reward": 0.5, "components": {"exact": 0.0}, "reference": "1", "label": "a",
        "group_id": 7, "sample_id": 14, "response_length": 2, "truncated": False, "valid": True,
    }  # fmt: skip
    assert second["truncated"] and not second["valid"] and second["reference"] == 2
    assert score(first) == 0.5 and score(second) is None
    image = Image.new("RGB", (2, 2))
    first, second = records_from_rollouts(rollouts([image, image]))
    assert first["images"] == [image, image] and "images" not in second and "videos" not in first


def test_records_to_come_keep_their_media_and_others_are_let_go():
    prompts = [PromptFeatures("p", [1], group_id=i, images=[Image.new("RGB", (8, 4))]) for i in range(6)]
    made = [Rollout(prompts[i // 3], [5], None, "", False, i, reward=float(i)) for i in range(18)]
    shown = select(records_from_rollouts(made), 3, 42, 1)
    freed = release_media(made, {record["sample_id"] for record in shown})
    left = [prompt for prompt in prompts if isinstance(prompt.images[0], Image.Image)]
    assert {prompt.group_id for prompt in left} == {record["group_id"] for record in shown} and len(left) < 6
    assert freed == 4 * 8 * 4 * (6 - len(left)) and all(len(prompt.images) == 1 for prompt in prompts)
    written = gather_records(records_from_rollouts(made), 3, 42, 1)
    assert len(written) == 3 and all(isinstance(record["images"][0], Image.Image) for record in written)


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
    chosen = [record["sample_id"] for record in select(records, count, 3, 1)]
    assert len(chosen) == len(set(chosen)) == min(count, len(records))
    assert chosen == [record["sample_id"] for record in select(records, count, 3, 1)]


def test_random_picks_keep_their_order_and_depend_on_the_seed():
    records = [{"sample_id": index} for index in range(50)]
    picks = {seed: [record["sample_id"] for record in pick_random(records, 5, seed)] for seed in (1, 2)}
    assert picks[1] == sorted(picks[1]) and picks[1] != picks[2]


@pytest.mark.parametrize("shape", [(3, 56, 56), (3, 4, 32, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_rank_sends_the_bytes_of_its_own_selection_and_no_more(monkeypatch, shape, dtype):
    batch = (torch.rand(64, *shape) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    sent = []

    def gather(value):
        sent.append(len(pickle.dumps(value)))
        return [value]

    monkeypatch.setattr(rollouts_module, "all_gather_object", gather)
    kept = gather_records(records_from_media(["p"] * 64, list(batch), torch.rand(64)), 8, run_seed=1, step=2)
    assert len(kept) == 8 and sent[0] <= 1.1 * 8 * batch[0].numel()


def test_what_is_sent_shows_the_same_pixels():
    image, video = torch.rand(3, 6, 6), torch.rand(3, 5, 6, 6)
    record = packed({"images": [image, Image.new("RGB", (2, 2))], "videos": [video]})
    assert to_pil(record["images"][0]).tobytes() == to_pil(image).tobytes() and record["images"][1].size == (2, 2)
    pairs = zip(video_frames(record["videos"][0]), video_frames(video), strict=True)
    assert all(sent.tobytes() == original.tobytes() for sent, original in pairs)
