"""The buffer: what goes in comes out, normalisation, order, limits, state, and two real ranks."""

import io
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from PIL import Image
from replay_cases import diffusion_item, text_item, vision_item

from lightrft_visual.errors import CheckpointError, ConfigError, DataError
from lightrft_visual.experience.batch_plan import MicroBatch
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.items import make_experience_batch
from lightrft_visual.experience.types import ExperienceDiffusion
from lightrft_visual.experience.vision import VisionTensors


def filled(items: list, size: int = 2, **options) -> NaiveReplayBuffer:
    buffer = NaiveReplayBuffer(size, **options)
    buffer.append(make_experience_batch(items))
    return buffer


def numbered(count: int) -> list:
    return [text_item(5, 2, sample_id=torch.tensor(index)) for index in range(count)]


def ids(batches) -> list[list[int]]:
    return [batch.sample_id.tolist() for batch in batches]


# --- in and out ----------------------------------------------------------------------------------------------------


def test_padding_is_stripped_on_the_way_in():
    batch = make_experience_batch([vision_item(2, length=9), vision_item(0, length=4, actions=3)])
    batch.layout = None  # as the experience maker builds it
    buffer = NaiveReplayBuffer(2)
    buffer.append(batch)
    found = [(len(item.sequences), len(item.advantages), item.image_counts.item()) for item in buffer]
    assert found == [(9, 2, 2), (4, 3, 0)] and batch.sequences.shape == (2, 10)


@pytest.mark.parametrize("packing", [False, True])
def test_packed_experience_goes_in_as_it_is(packing):
    items = [text_item(5, 2), text_item(4, 3)]
    buffer = NaiveReplayBuffer(2, packing_samples=packing)
    buffer.append(make_experience_batch(items, packing_samples=True))
    assert list(buffer) == items
    assert buffer.collate_fn(buffer.items).is_packed is packing


def test_the_limit_drops_the_oldest():
    buffer = filled(numbered(3), limit=4)
    buffer.append(make_experience_batch(numbered(3)))
    assert [item.sample_id.item() for item in buffer] == [2, 0, 1, 2]
    buffer.clear()
    assert len(buffer) == 0


def test_sampling_draws_different_items():
    buffer, again = (filled(numbered(6), size=4, seed=3) for _ in range(2))
    drawn = [buffer.sample().sample_id.tolist() for _ in range(8)]
    assert all(len(set(each)) == 4 for each in drawn) and len(set(map(tuple, drawn))) > 1
    assert drawn[0] == again.sample().sample_id.tolist()
    with pytest.raises(DataError, match="cannot draw 4 samples, the buffer holds 2"):
        filled(numbered(2), size=4).sample()


def test_a_torch_data_loader_can_read_it_and_trajectories_have_the_same_buffer():
    buffer = filled(numbered(5))
    loader = torch.utils.data.DataLoader(buffer, batch_size=2, shuffle=True, collate_fn=buffer.collate_fn)
    assert sorted(sum(ids(loader), [])) == [0, 1, 2, 3, 4]
    batches = list(filled([diffusion_item(seed=index) for index in range(5)]).batches(seed=1))
    assert all(isinstance(batch, ExperienceDiffusion) for batch in batches)
    assert sorted(sum([batch.info["reward"].tolist() for batch in batches], [])) == [0, 1, 2, 3, 4]


# --- order ---------------------------------------------------------------------------------------------------------


def test_each_epoch_has_its_own_order_and_steps_hold_their_share_of_samples():
    buffer = filled(numbered(10), size=4)
    first, again, second = (ids(buffer.batches(seed)) for seed in (1, 1, 2))
    assert first == again != second
    assert sorted(map(len, first)) == [3, 3, 4] and sorted(sum(second, [])) == list(range(10))
    plan = buffer.plan(seed=1, step_size=4)
    assert [sum(len(batch.indices) for batch in step) for step in plan] == [4, 4, 2]
    assert not any(batch.filler for step in plan for batch in step)


def test_token_budget_fills_packed_batches():
    items = [text_item(length, 2) for length in (3, 4, 5, 6, 7, 5)]
    batches = filled(items, packing_samples=True).batches(seed=1, token_budget=10)
    assert [batch.sequences.shape[1] for batch in batches] == [10, 10, 10]
    with pytest.raises(ConfigError, match="packing_samples"):
        filled(items).plan(1, token_budget=10)


def test_fillers_are_invalid_copies_and_an_empty_buffer_cannot_train():
    buffer = filled(numbered(2))
    batch = buffer.load(MicroBatch([1], filler=True))
    assert batch.valid.tolist() == [False] and batch.sample_id.tolist() == [1] and buffer[1].valid is None
    with pytest.raises(DataError, match=r"without samples; samples by rank: \[0\]"):
        NaiveReplayBuffer(2).plan(1)
    with pytest.raises(ConfigError, match="at least 1"):
        NaiveReplayBuffer(0)


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_shared_changes_no_step(packing):
    """A run trains on the same samples in the same update whether prompts are computed once or not."""
    items, budget, found = numbered(16), 40 if packing else None, []
    for index, item in enumerate(items):
        item.group_id = torch.tensor(index // 4)
    for shared in (False, True):
        plan = filled(items, 3, packing_samples=packing, share_prefix=shared).plan(7, step_size=6, token_budget=budget)
        found.append([sorted(index for batch in step for index in batch.indices) for step in plan])
    assert found[0] == found[1] and [len(step) for step in found[0]] == [6, 6, 4]
    assert len({index // 4 for index in found[0][0]}) == 2


# --- normalisation -------------------------------------------------------------------------------------------------


def test_masked_actions_count_neither_for_mean_nor_for_deviation():
    items = [
        text_item(5, 3, advantages=torch.tensor([1.0, 99.0, 3.0]), action_mask=torch.tensor([True, False, True])),
        text_item(5, 2, advantages=torch.tensor([5.0, 7.0])),
        text_item(5, 1, advantages=torch.tensor([1e9]), valid=torch.tensor(False)),
        text_item(5, 2, advantages=None),
    ]
    buffer = filled(items)
    buffer.normalize("advantages", None)
    # counted: 1, 3, 5, 7; mean 4, population standard deviation sqrt(5)
    assert buffer[0].advantages.tolist() == pytest.approx([-3 / 5**0.5, 95 / 5**0.5, -1 / 5**0.5])
    assert buffer[1].advantages.tolist() == pytest.approx([1 / 5**0.5, 3 / 5**0.5])
    assert buffer[3].advantages is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([text_item(6, n, advantages=torch.tensor([float(n)])) for n in (1, 2, 3)], [-(1.5**0.5), 0, 1.5**0.5]),
        (
            [text_item(5, 3, advantages=torch.tensor([NAN, 2, 4]), action_mask=torch.tensor([False, True, True]))],
            [-1, 1],
        ),
        ([diffusion_item(advantages=torch.tensor(value)) for value in (1.0, 5.0)], [-1, 1]),
        ([text_item(5, 3, advantages=torch.tensor([1, 2, 3]))], [-(1.5**0.5), 0, 1.5**0.5]),
        ([text_item(5, 2, advantages=torch.tensor([3.0, 3.0]))], [0, 0]),
    ],
    ids=[
        "one number of a sample counts once",
        "masked NaN does no harm",
        "trajectories",
        "whole numbers",
        "equal ones",
    ],
)
def test_numbers_have_mean_0_and_deviation_1(items, expected):
    buffer = filled(items)
    buffer.normalize("advantages")
    found = torch.cat([item.advantages.reshape(-1) for item in buffer])
    assert found[~found.isnan()].tolist() == pytest.approx(expected)


def test_a_strategy_sums_over_its_ranks_and_unknown_names_are_refused():
    two_equal_ranks = SimpleNamespace(all_reduce=lambda data, op: {"sum": data * 2}[op])
    buffer = filled([text_item(5, 2, advantages=torch.tensor([1.0, 3.0]))])
    buffer.normalize("advantages", two_equal_ranks)
    assert buffer[0].advantages.tolist() == pytest.approx([-1, 1])
    with pytest.raises(ConfigError, match="'advantage'"):
        buffer.normalize("advantage")


# --- state ---------------------------------------------------------------------------------------------------------


def loaded_again(buffer: NaiveReplayBuffer) -> NaiveReplayBuffer:
    """By a file that holds nothing but tensors and plain values."""
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    again = NaiveReplayBuffer(1, seed=0)
    again.load_state_dict(torch.load(stream, weights_only=True))
    assert list(again) == list(buffer)
    return again


def test_state_is_exact_and_safe_to_load():
    image = Image.effect_noise((8, 8), 50).convert("RGB")
    info = {"reward": 0.1, "kind": "count", "metrics": {"format": torch.tensor(0.5)}}
    items = [vision_item(2, raw_images=[image, image], info=info), vision_item(0, info=None), text_item(values=None)]
    buffer = filled(items, size=1)
    buffer.sample()
    assert torch.equal(loaded_again(buffer).sample().sequences, buffer.sample().sequences)
    trajectories = NaiveReplayBuffer(1)
    for steps in (3, 3, 4, 3):  # of several shapes
        trajectories.append(make_experience_batch([diffusion_item(steps, seed=steps)]))
    loaded_again(trajectories)


def test_what_cannot_be_stored_is_named():
    buffer = filled([text_item(info={"solver": object()})])
    with pytest.raises(CheckpointError, match=r"info\[solver\]\[0\] is a object"):
        buffer.state_dict()
    with pytest.raises(CheckpointError, match="version 0"):
        buffer.load_state_dict({"version": 0})


# --- two ranks -----------------------------------------------------------------------------------------------------


def balanced() -> dict[str, list]:
    """On each of two ranks, of which the first has more samples."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    items = [
        text_item(4 + i, 1, advantages=torch.tensor([10.0 * rank + i]), sample_id=torch.tensor(10 * rank + i))
        for i in range(2 if rank else 5)
    ]
    buffer = filled(items, packing_samples=True)
    buffer.normalize("advantages", None)
    told = {"normal": [item.advantages.item() for item in buffer]}
    plan = buffer.plan(1, step_size=3)
    told |= {"steps": [len(step) for step in plan], "fillers": sum(batch.filler for step in plan for batch in step)}
    told |= {"by count": len([*buffer.batches(1)]), "by tokens": len([*buffer.batches(1, token_budget=12)])}
    told |= {"tokens": sum(len(item.sequences) for item in buffer), "ids": [int(item.sample_id) for item in buffer]}

    shown = VisionTensors.of(pixel_values=torch.ones(64, 1000), image_grid_thw=torch.tensor([[1, 8, 8]]))
    many = [vision_item(0, vision=shown, image_counts=torch.tensor(1), sample_id=torch.tensor(i)) for i in range(8)]
    buffer = filled([vision_item(0, sample_id=torch.tensor(9))] if rank else many)
    buffer.plan(1)
    kept = [item.vision for item in buffer]
    told["shared"] = [sum(len(each.names) > 0 for each in kept), VisionTensors.gather(kept).nbytes() - shown.nbytes()]

    own = range(12, 16) if rank else range(12)
    groups = [text_item(9, 1, sample_id=torch.tensor(i), group_id=torch.tensor(i // 4)) for i in own]
    buffer = filled(groups, share_prefix=True)
    plan = [batch for step in buffer.plan(1, step_size=8) for batch in step]
    told["groups"] = [{int(buffer[i].group_id) for i in batch.indices} for batch in plan]
    return told | {"sizes": [len(batch.indices) for batch in plan]}


@pytest.mark.slow
def test_two_ranks_agree():
    first, second = on_ranks(balanced)
    both = {name: first[name] + second[name] for name in ("normal", "ids", "groups")}
    numbers = torch.tensor([0.0, 1, 2, 3, 4, 10, 11], dtype=torch.float64)
    expected = (numbers - numbers.mean()) / numbers.std(correction=0)
    assert both["normal"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert all(first[name] == second[name] for name in ("steps", "by count", "by tokens"))
    # Seven samples of 4, 5, 6, 7, 8 and 4, 5 tokens: each rank ends with nearly half of them.
    assert sorted(both["ids"]) == [0, 1, 2, 3, 4, 10, 11] and abs(first["tokens"] - second["tokens"]) <= 3
    # Four or five of nine samples each, and one copy of the patches that all of them show.
    assert sorted([first["shared"][0], second["shared"][0]]) in ([3, 5], [4, 4])
    assert first["shared"][1] == second["shared"][1] == 0
    # Two steps of two groups: each rank computes one of them, whole, in one micro-batch.
    assert sorted(both["groups"], key=min) == [{0}, {1}, {2}, {3}]
    assert first["sizes"] == second["sizes"] == [4, 4] and first["by tokens"] == 2
    assert 0 in (first["fillers"], second["fillers"])
