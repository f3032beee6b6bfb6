"""Vision tensors: held once a prompt on their whole way, joined in order, read and written by the contract's names."""

import copy
import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from replay_cases import vision_item

from lightrft_visual.errors import DataError
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.items import BufferItemVL, make_experience_batch, split_experience_batch
from lightrft_visual.experience.rollouts import PromptFeatures, Rollout, collate
from lightrft_visual.experience.types import ExperienceVL, ModelInputs
from lightrft_visual.experience.vision import VisionTensors, check_alike, joined, samples_of, stacked
from lightrft_visual.runtime.host_copies import known_on_host, to_device

PATCHES, DIM, G = 256, 384, 16


def prompt(seed: int = 0) -> PromptFeatures:
    draw = torch.Generator().manual_seed(seed)
    vision = VisionTensors.of(
        pixel_values=torch.randn(PATCHES, DIM, generator=draw), image_grid_thw=torch.tensor([[1, 16, 16]])
    )
    return PromptFeatures("see", [1, 2, 3], group_id=seed, images=[object()], vision=vision)


def experience_of(prompts: list[PromptFeatures], count: int) -> ExperienceVL:
    rollouts = [
        Rollout(each, [4, 5], [0.0, 0.0], "", False, sample_id=n, reward=1.0) for each in prompts for n in range(count)
    ]
    experience = collate(rollouts, 0, vision=True)
    experience.action_log_probs = torch.zeros(len(rollouts), 2)
    return experience


def held(parts: list[VisionTensors]) -> int:
    return VisionTensors.gather(parts).nbytes()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_sixteen_samples_of_a_prompt_hold_its_patches_once(packed):
    shared = prompt()
    one = shared.vision.nbytes()
    assert one >= PATCHES * DIM * 4
    experience = experience_of([shared], G)
    buffer = NaiveReplayBuffer(G, packing_samples=packed)
    buffer.append(experience)
    batch = buffer.collate_fn(buffer.items)
    inputs = ModelInputs.of(batch)
    everything = [shared.vision, experience.vision, *(item.vision for item in buffer), batch.vision, inputs.vision]
    assert held(everything) <= 1.2 * one
    assert batch.pixel_values.shape == (G * PATCHES, DIM)
    again = NaiveReplayBuffer(G)
    again.load_state_dict(buffer.state_dict())
    assert held([item.vision for item in again]) <= 1.2 * one


def test_samples_sent_to_another_rank_or_device_carry_their_prompts_patches_once():
    experience = experience_of([prompt(0), prompt(1)], G // 2)
    buffer = NaiveReplayBuffer(G)
    buffer.append(experience)
    parcel = pickle.dumps(buffer.items)
    assert len(parcel) <= 1.2 * 2 * prompt().vision.nbytes()
    assert held([item.vision for item in pickle.loads(parcel)]) <= 1.2 * 2 * prompt().vision.nbytes()
    moved = experience.vision.to("meta")
    assert len({id(sample) for sample in moved.samples}) == 2
    assert moved.get("pixel_values").shape == (G * PATCHES, DIM)


def test_tensors_of_any_name_travel_and_a_sample_may_have_more_rows_than_images():
    own = VisionTensors.of(pixel_values=torch.rand(2, 3, 4, 4), pixel_attention_mask=torch.ones(2, 4, 4))
    more = VisionTensors.of(pixel_values=torch.rand(5, 3, 4, 4), pixel_attention_mask=torch.ones(5, 4, 4))
    items = [
        BufferItemVL(torch.arange(3), vision=vision, image_counts=count, action_log_probs=torch.zeros(1))
        for vision, count in ((own, None), (more, torch.tensor(2)), (VisionTensors(), None))
    ]
    batch = make_experience_batch(items)
    assert ModelInputs.of(batch).vision.joined().keys() == {"pixel_values", "pixel_attention_mask"}
    assert batch.image_counts.tolist() == [2, 2, 0] and batch.pixel_values.shape[0] == 7
    buffer = NaiveReplayBuffer(1)
    buffer.append(batch)
    assert [item.vision for item in buffer] == [own, more, VisionTensors()]


def test_names_of_the_contract_read_and_write():
    item = vision_item(2, 1)
    other = copy.copy(item)
    assert item.vision.names == ["pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]
    item.pixel_values = item.pixel_values + 1
    assert not torch.equal(other.pixel_values, item.pixel_values)
    item.image_grid_thws = None
    assert item.image_grid_thws is None and "image_grid_thw" not in item.vision.names
    assert other.image_grid_thws.tolist() == [[1, 2, 1], [1, 2, 2]]


def test_replacing_a_field_keeps_the_others():
    item = vision_item(1)
    assert replace(item, valid=torch.tensor(False)).pixel_values is item.pixel_values
    swapped = replace(item, pixel_values=item.pixel_values * 2)
    assert torch.equal(swapped.pixel_values, item.pixel_values * 2)
    assert torch.equal(swapped.image_grid_thws, item.image_grid_thws)
    assert len(replace(make_experience_batch([item, vision_item(2)]), valid=None).vision) == 2


def test_rows_that_do_not_add_up_are_refused():
    joined = VisionTensors.of(pixel_values=torch.rand(5, 3), image_grid_thw=torch.tensor([[1, 2, 2], [1, 1, 1]]))
    assert [len(each["pixel_values"]) for each in joined.shared_out(2, {})] == [4, 1]
    with pytest.raises(DataError, match="image_grid_thws has 2 rows, its samples own 3"):
        joined.shared_out(2, {"image": [2, 1]})
    with pytest.raises(DataError, match="vision inputs of 2 samples, the batch has 3"):
        VisionTensors([{}, {}]).shared_out(3, {})


A, B = object(), object()


def hand_made(**fields) -> ExperienceVL:
    """Two samples whose images came joined, without counts."""
    pixels, grids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 1, 1]] * 2)
    own = {"sequences": torch.ones(2, 3), "action_log_probs": torch.zeros(2, 1), "pixel_values": pixels}
    return ExperienceVL(**own | {"image_grid_thws": grids} | fields)


@pytest.mark.parametrize(
    "raw, owned",
    [
        ([[A, B], []], [[1.0, 2.0], None]),
        ([None, [A, B]], [None, [1.0, 2.0]]),
        ([[A], [B]], [[1.0], [2.0]]),
        ([[], []], [[1.0], [2.0]]),
    ],
)
def test_without_counts_raw_images_say_whose_the_rows_are(raw, owned):
    found = [item.pixel_values for item in split_experience_batch(hand_made(raw_images=raw))]
    assert [None if value is None else value.flatten().tolist() for value in found] == owned


def test_raw_images_that_contradict_the_grids_are_refused():
    with pytest.raises(DataError, match="image_grid_thws has 2 rows, its samples own 3"):
        split_experience_batch(hand_made(raw_images=[[A, B], [A]]))
    with pytest.raises(DataError, match="sample 0: raw_images are 2, but its image_grid_thws hold 1"):
        make_experience_batch([vision_item(1, raw_images=[A, B]), vision_item(0)])


# --- host memory from rollouts to micro-batches --------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    file = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "memory.py"
    spec = importlib.util.spec_from_file_location("bench_memory", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_batch_holds_its_images_once_and_a_second_copy_would_be_seen(bench):
    prompts = bench.prompts_of(128, patches=80, length=24)
    images = 128 * 80 * bench.PATCH_WIDTH * 4
    held = bench.through_the_stages(prompts, samples=4, tokens=8, peaks=bench.Peaks())
    assert images < held <= bench.LIMIT * images
    first, second = (bench.prompts_of(2, patches=40, length=12) for _ in range(2))
    assert sum(bench.storages([first, second]).values()) == 2 * sum(bench.storages([first, first]).values())


def test_what_samples_share_is_checked_and_the_first_of_them_is_named():
    good = {"pixel_values": torch.zeros(4, DIM), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    bad = good | {"pixel_values": torch.zeros(3, DIM)}
    check_alike([good, good])
    with pytest.raises(DataError, match="^sample 1: .*has 3 patches"):
        check_alike([good, bad, bad, bad])


def test_masks_that_are_joined_on_a_device_stay_known_on_the_host_and_texts_do_not():
    """Families ask how long the texts of a batch are in every forward, which would wait for the device."""
    texts = [{"context": torch.rand(1, n, 3), "mask": torch.ones(1, n, dtype=torch.long)} for n in (2, 4)]
    found = stacked(texts, torch.device("meta"))
    assert known_on_host(found["mask"]).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert known_on_host(found["context"]) is None and found["context"].shape == (2, 4, 3)
    again = joined([found["mask"], to_device(torch.zeros(1, 5, dtype=torch.long), "meta")])
    assert known_on_host(again).shape == again.shape == (3, 5)
    assert known_on_host(joined([found["mask"], torch.zeros(1, 4, dtype=torch.long, device="meta")])) is None
    some = {name: samples_of(value, [1]) for name, value in found.items()}
    assert known_on_host(some["mask"]).tolist() == [[1, 1, 1, 1]] and known_on_host(some["context"]) is None
    assert known_on_host(joined([to_device(torch.tensor([900.0]), "meta")] * 2)).tolist() == [900, 900]  # timesteps
