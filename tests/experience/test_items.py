"""Items to batches and back: exact round trips, layouts, padding removal, errors."""

import copy
import gc
import weakref
from dataclasses import MISSING, fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_cases import (
    diffusion_item,
    diffusion_items,
    mixed_items,
    text_item,
    text_items,
    vision_item,
)

from lightrft_visual.errors import DataError
from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.experience.fields import Kind, unpack_actions, zero_pad_sequences
from lightrft_visual.experience.items import (
    BufferItem,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    replay_fields,
    split_experience_batch,
    strip_padding,
)
from lightrft_visual.experience.types import Experience, ExperienceVL, map_tensors

FORMS = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_round_trip(items: list, packed: bool) -> None:
    again = split_experience_batch(make_experience_batch(items, packed))
    assert again == items


@pytest.mark.parametrize("make", [text_item, vision_item, diffusion_item])
def test_samples_are_equal_where_class_and_values_are_whatever_tensors_they_hold(make):
    item, nan = make(), make(info={"reward": torch.tensor([float("nan"), 1.0])})
    assert item == copy.deepcopy(item) and nan == copy.deepcopy(nan) and item != nan and item in [nan, item]
    assert item != make(advantages=torch.zeros(2)) and item != vars(item)
    with pytest.raises(TypeError, match="unhashable"):
        hash(item)


# --- round trips ---------------------------------------------------------------------------------------------------


@FORMS
@QUICK
@given(items=mixed_items)
def test_any_mix_comes_back_exactly(packed, items):
    assert_round_trip(items, packed)


@QUICK
@given(items=st.lists(diffusion_items(), min_size=1, max_size=4))
def test_trajectories_come_back_exactly(items):
    shapes = {tuple(item.advantages.shape) if item.advantages is not None else () for item in items}
    assert_round_trip(items[:1] if len(shapes) > 1 else items, packed=False)


@FORMS
def test_models_without_grids_own_one_row_per_image_and_fields_keep_their_dtype(packed):
    typed = {
        "attention_mask": torch.ones(5, dtype=torch.bool),
        "action_log_probs": torch.rand(2, dtype=torch.bfloat16),
    }
    items = [
        vision_item(images=0, pixel_values=torch.rand(count, 3, 4, 4) if count else None, **typed)
        for count in (2, 0, 1)
    ]
    batch = make_experience_batch(items, packed)
    assert batch.pixel_values.shape == (3, 3, 4, 4) and batch.image_counts.tolist() == [2, 0, 1]
    assert_round_trip(items, packed)


@FORMS
def test_seconds_stay_with_their_videos(packed):
    items = [
        vision_item(videos=2, video_seconds_per_grid=torch.tensor([0.5, 4.0])),
        vision_item(videos=0),
        vision_item(videos=1),
        text_item(),
        vision_item(videos=1, video_seconds_per_grid=torch.tensor([0.25])),
    ]
    batch = make_experience_batch(items, packed)
    assert batch.video_seconds_per_grid.tolist() == [0.5, 4.0, 1.0, 0.25]
    assert_round_trip(items, packed)
    items[0].video_seconds_per_grid = torch.tensor([0.5])
    with pytest.raises(DataError, match="sample 0: video_seconds_per_grid .* hold 2"):
        make_experience_batch(items, packed)


@FORMS
def test_items_own_their_memory(packed):
    batch = make_experience_batch([vision_item(), vision_item(length=7)], packed)
    freed = [weakref.ref(value) for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    items = split_experience_batch(batch)
    own = [value for item in items for value in vars(item).values() if isinstance(value, torch.Tensor)]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in own)
    del batch
    gc.collect()
    assert not any(reference() is not None for reference in freed)


# --- the forms -----------------------------------------------------------------------------------------------------


def test_padded_form_puts_the_actions_last():
    items = [text_item(5, 2), text_item(4, 3), text_item(1, 1)]
    batch = make_experience_batch(items)
    assert batch.sequences.tolist() == [[1, 2, 3, 4, 5, 0], [0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]]
    assert batch.action_mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert batch.advantages.tolist() == [[0.75, 1.75, 0], [0.75, 1.75, 2.75], [0.75, 0, 0]]
    assert isinstance(batch, Experience) and not batch.is_packed and batch.batch_size == 3
    assert not is_vl_experience(batch) and is_vl_experience(make_experience_batch([vision_item(images=0)]))


def test_packed_form_has_no_padding():
    items = [text_item(5, 2), text_item(4, 3, attention_mask=torch.tensor([1, 0, 1, 1]))]
    batch = make_experience_batch(items, packing_samples=True)
    assert batch.sequences.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 2, 0, 2, 2]]
    assert batch.advantages.tolist() == [[0.75, 1.75, 0.75, 1.75, 2.75]]
    assert (batch.packed_seq_lens, batch.num_actions) == ([5, 4], [2, 3])
    assert batch.is_packed and batch.batch_size == 2


def test_padding_always_comes_with_masks():
    bare = {"attention_mask": None, "action_mask": None}
    batch = make_experience_batch([text_item(5, 2, **bare), text_item(4, 3, **bare)])
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.action_mask.tolist() == [[True, True, False], [True, True, True]]
    even = make_experience_batch([text_item(5, 2, **bare)] * 2)
    assert even.attention_mask is None and even.action_mask is None


def test_one_number_per_sample_and_what_is_lacking_is_filled_so_that_it_counts_for_nothing():
    items = [text_item(5, 2, advantages=torch.tensor([0.5])), text_item(4, 3, advantages=torch.tensor([-1.0]))]
    assert make_experience_batch(items).advantages.tolist() == [[0.5], [-1.0]]
    assert make_experience_batch(items, packing_samples=True).advantages.tolist() == [[0.5, 0.5, -1, -1, -1]]
    items[1].advantages = torch.tensor([1.0, 2.0, 3.0])
    assert make_experience_batch(items).advantages.tolist() == [[0.5, 0.5, 0], [1, 2, 3]]
    batch = make_experience_batch(
        [text_item(group_id=torch.tensor(7), valid=torch.tensor(False), kl=torch.ones(2)), text_item()]
    )
    assert (batch.group_id.tolist(), batch.valid.tolist()) == ([7, -1], [False, True])
    assert batch.kl.tolist() == [[1, 1], [0, 0]]


def test_a_field_added_to_a_made_batch_reaches_the_items():
    batch = make_experience_batch([text_item(5, 2, values=None, info=None), text_item(4, 3, values=None, info=None)])
    batch.values = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
    batch.info["reward"] = torch.tensor([0.5, 1.5])
    first, second = split_experience_batch(batch)
    assert first.values.tolist() == [1, 2] and second.values.tolist() == [3, 4, 5]
    assert first.info == {"reward": 0.5} and second.info == {"reward": 1.5}


def test_a_batch_made_by_hand_is_split_by_rows():
    batch = ExperienceVL(
        sequences=torch.tensor([[0, 1, 2], [3, 4, 0]]),
        pixel_values=torch.arange(10.0).reshape(5, 2),
        image_grid_thws=torch.tensor([[1, 1, 1], [1, 2, 2]]),
        action_mask=torch.tensor([[True, True], [True, False]]),
        values=torch.tensor([[0.5], [1.5]]),
        info={"reward": torch.tensor([1.0, 2.0]), "lr": 0.1, "kind": ["a", "b"], "m": {"x": torch.tensor([3.0, 4.0])}},
    )
    first, second = split_experience_batch(batch)
    assert first.sequences.tolist() == [0, 1, 2] and second.action_mask.tolist() == [True, False]
    assert first.pixel_values.tolist() == [[0, 1]] and len(second.pixel_values) == 4
    assert first.image_counts is None and second.values.tolist() == [1.5]
    assert second.info == {"reward": 2.0, "lr": 0.1, "kind": "b", "m": {"x": 4.0}}


def test_a_packed_batch_made_by_hand_is_split_by_its_lengths():
    none = dict.fromkeys(("base_action_log_probs", "returns", "action_mask", "info"))
    numbers = {name: torch.arange(3.0)[None] for name in ("action_log_probs", "advantages")}
    batch = Experience(
        sequences=torch.arange(7)[None], values=torch.tensor([[8.0, 9.0]]), packed_seq_lens=[4, 3], num_actions=[1, 2],
        attention_mask=torch.tensor([[1, 1, 1, 1, 2, 2, 2]]), **numbers, **none,
    )  # fmt: skip
    first, second = split_experience_batch(batch)
    assert second.sequences.tolist() == [4, 5, 6] and second.attention_mask.tolist() == [1, 1, 1]
    assert first.action_log_probs.tolist() == [0] and second.advantages.tolist() == [1, 2]
    assert first.values.tolist() == [8] and first.info is None


# --- padding -------------------------------------------------------------------------------------------------------


T, N = True, False


@pytest.mark.parametrize(
    ("tokens", "mask", "actions", "action_mask", "kept", "kept_actions"),
    [
        ([0, 0, 1, 2, 3, 0, 0], None, [2, 3, 0, 0], None, [1, 2, 3], [2, 3]),
        ([9, 0, 0, 5, 0, 6, 0, 9], [0, 1, 1, 1, 1, 0, 1, 0], [1, 2, 3, 4], [T, N, T, N], [0, 0, 5, 0, 6, 0], [1, 2, 3]),
        ([0, 7, 0, 0], None, [1, 2], [T, N], [7, 0], [1]),
        ([3, 4, 5], [1, 1, 1], [1, 2], [T, N], [3, 4, 5], [1, 2]),
        ([0, 7, 8, 0], [0, 1, 1, 0], [1, 0], [T, T], [7, 8], [1]),
    ],
    ids=["both ends", "the mask decides, not the token", "without a mask a sampled zero is a token",
         "a masked tail of the response is no padding", "actions end with the tokens"],
)  # fmt: skip
def test_padding_is_stripped_and_what_is_sampled_is_kept(tokens, mask, actions, action_mask, kept, kept_actions):
    masks = {"attention_mask": mask, "action_mask": action_mask}
    item = text_item(
        len(tokens), len(actions), sequences=torch.tensor(tokens), action_log_probs=torch.tensor(actions).float(),
        returns=torch.tensor([0.5]), **{name: each and torch.tensor(each) for name, each in masks.items()},
    )  # fmt: skip
    (stripped,) = remove_padding_in_sequences([item])
    assert stripped is item and item.sequences.tolist() == kept and item.action_log_probs.tolist() == kept_actions
    assert len(item.advantages) == len(kept_actions) and item.returns.tolist() == [0.5]  # one number is not cut
    if mask is not None:
        start = mask.index(1)
        assert item.attention_mask.tolist() == mask[start : start + len(kept)]
        assert item.action_mask.tolist() == action_mask[: len(kept_actions)]


def test_stripping_leaves_what_is_not_of_tokens_or_actions_as_it_is():
    """Not batched and split again for each sample: the same objects, also where fields contradict each other."""
    tokens, number = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([0.5])
    held = {"info": {"reward": 1.0}, "group_id": 7, "image_counts": torch.tensor(2), "raw_images": [], "values": number}
    item = vision_item(sequences=tokens, attention_mask=(tokens != 0).long(), **held)
    vision, advantages = item.vision, item.advantages
    remove_padding_in_sequences([item])
    assert item.sequences.tolist() == [1, 2, 3] and torch.equal(item.advantages, advantages[:1])
    assert item.vision is vision and all(getattr(item, name) is value for name, value in held.items())


@QUICK
@given(items=st.lists(text_items(), min_size=1, max_size=4), left=st.integers(0, 3), right=st.integers(0, 3))
def test_stripping_undoes_padding(items, left, right):
    for item in items:
        item.attention_mask = torch.ones(len(item.sequences), dtype=torch.long)
        item.action_mask = torch.ones(len(item.action_mask if item.action_mask is not None else _actions(item))).bool()
    batch = make_experience_batch(items)
    width = batch.action_mask.shape[1]
    for name, value in vars(batch).items():
        per_token = name in ("sequences", "attention_mask")
        if per_token or (isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == width):
            setattr(batch, name, torch.nn.functional.pad(value, (left if per_token else 0, right)))
    batch.layout = None
    direct, stepwise = strip_padding(batch), remove_padding_in_sequences(split_experience_batch(batch))
    for item, one, other in zip(items, direct, stepwise):
        assert one == other
        assert torch.equal(one.sequences, item.sequences) and torch.equal(one.action_mask, item.action_mask)


def _actions(item: BufferItem) -> torch.Tensor:
    names = ("action_log_probs", "base_action_log_probs", "action_entropy", "rollout_log_probs", "kl")
    return next(value for value in (getattr(item, name) for name in names) if value is not None)


def test_zero_pad_sequences_pads_the_side_that_is_named():
    parts = [torch.tensor([1, 2]), torch.tensor([3])]
    assert zero_pad_sequences(parts, "left").tolist() == [[1, 2], [0, 3]]
    assert zero_pad_sequences(parts, "right").tolist() == [[1, 2], [3, 0]]
    with pytest.raises(AssertionError, match="middle"):
        zero_pad_sequences(parts, "middle")


@pytest.mark.parametrize("shape", [(1, 6), (6,)])
def test_unpacking_actions_keeps_gradients(shape):
    flat = torch.arange(1.0, 7.0).reshape(shape).requires_grad_()
    padded = unpack_actions(flat, [1, 3, 2])
    assert padded.tolist() == [[1, 0, 0], [2, 3, 4], [5, 6, 0]]
    (padded * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert flat.grad.reshape(-1).tolist() == [1, 2, 2, 2, 3, 3]
    with pytest.raises(DataError, match="6 per-action values for 4 actions"):
        unpack_actions(flat, [2, 2])


# --- contradictions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item,message",
    [
        (text_item(5, 2, action_entropy=torch.ones(3)), "sample 1: per-action fields of different lengths"),
        (text_item(2, 2, sequences=torch.ones(1)), "sample 1: 2 actions, but only 1 tokens"),
        (text_item(5, 2, values=torch.ones(3)), "sample 1: values"),
        (text_item(5, 2, attention_mask=torch.ones(4).long()), "sample 1: attention_mask"),
        (text_item(5, 2, action_log_probs=torch.ones(2).double()), "sample 1: action_log_probs is torch.float64"),
        (text_item(5, 2, sequences=[1, 2, 3, 4, 5]), r"sample 1: sequences must be a tensor \(S\)"),
        (text_item(5, 2, action_log_probs=[0.0, 0.0]), "sample 1: action_log_probs must be a tensor"),
        (text_item(5, 2, values=torch.tensor(1.0)), "sample 1: values must be a tensor with one number an action"),
        (vision_item(1, image_grid_thws=[[1, 2, 2]]), "sample 1: image_grid_thws is a list, not a tensor"),
        (vision_item(1, pixel_values=torch.ones(3, 3)), "sample 1: pixel_values has 3 patches"),
        (vision_item(1, image_counts=torch.tensor(2)), "sample 1: image_counts is 2"),
        (vision_item(0, image_grid_thws=torch.tensor([1, 2, 2])), r"sample 1: image_grid_thws must be \(n, 3\)"),
        (diffusion_item(), "cannot be in one batch: BufferItem, BufferItemDiffusion"),
    ],
)
def test_contradictions_name_sample_and_field(item, message):
    first = vision_item() if isinstance(item, BufferItemVL) else text_item()
    with pytest.raises(DataError, match=message):
        make_experience_batch([first, item])


@pytest.mark.parametrize(
    "items,packed,message",
    [
        ([], False, "empty"),
        ([diffusion_item(3), diffusion_item(4)], False, "sample 1: latents"),
        ([diffusion_item(), diffusion_item(prompt_embeds={"text": torch.ones(6, 8)})], False, "1: prompt_embeds has"),
        ([diffusion_item()], True, "cannot be packed"),
    ],
)  # fmt: skip
def test_no_items_and_trajectories_of_different_shapes_are_refused(items, packed, message):
    with pytest.raises(ValueError, match=message):
        make_experience_batch(items, packed)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"image_counts": None, "layout": None}, "no image_counts or raw_images tell whose"),
        ({"info": {"m": {"r": torch.ones(3)}}}, r"info\[m/r\] has shape \(3,\), but the batch has 2 samples"),
        ({"kl": torch.ones(2)}, r"kl has shape \(2,\); a padded batch holds one row a sample"),
        ({"advantages": [1.0, 2.0]}, "advantages is a list, not a tensor"),
        ({"group_id": [1, 2]}, "group_id is a list, not a tensor"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(changes, message):
    made = make_experience_batch([vision_item(2), vision_item(1)])
    if "image_counts" in changes:
        made = ExperienceVL(made.sequences, made.pixel_values, made.image_grid_thws, action_log_probs=made.values)
    for name, value in changes.items():
        setattr(made, name, value)
    with pytest.raises(DataError, match=message):
        split_experience_batch(made)


@pytest.mark.parametrize("name", ["values", "returns", "advantages"])
def test_a_batch_made_by_hand_may_hold_one_number_a_sample(name):
    empty = dict.fromkeys(each.name for each in fields(Experience) if each.default is MISSING)
    given = {"sequences": torch.ones(2, 3), "action_log_probs": torch.zeros(2, 2), name: torch.tensor([1.0, 2.0])}
    items = split_experience_batch(Experience(**empty | given))
    assert [getattr(item, name).tolist() for item in items] == [[1.0], [2.0]]


def test_plain_numbers_stand_for_tensors_of_one_number():
    batch = make_experience_batch([text_item(group_id=3, valid=True), text_item(group_id=torch.tensor(4))])
    assert batch.group_id.tolist() == [3, 4] and batch.valid.tolist() == [True, True]
    assert make_experience_batch([vision_item(2, image_counts=2)]).image_counts.tolist() == [2]
    assert make_experience_batch([diffusion_item(advantages=0.5)]).advantages.tolist() == [0.5]


@pytest.mark.parametrize(
    "item, message",
    [
        (diffusion_item(prompt_embeds=torch.ones(2, 3)), "sample 0: prompt_embeds is a Tensor, not a dict"),
        (diffusion_item(prompt_embeds={"text": 1.0}), r"sample 0: prompt_embeds\[text\] is a float, not a tensor"),
        (diffusion_item(latents=[1.0]), "sample 0: latents is a list, not a tensor"),
        (text_item(attention_mask=[1] * 5), "sample 0: attention_mask is a list, not a tensor"),
        (text_item(advantages=0.5), "sample 0: advantages must be a tensor with one number an action"),
        (text_item(info=3), "sample 0: info is a int, not a dict"),
    ],
)
def test_a_field_of_another_type_is_named(item, message):
    with pytest.raises(DataError, match=message):
        make_experience_batch([item])


@pytest.mark.parametrize(
    "given, told",
    [({}, "dict$"), (None, "NoneType$"), (text_item(), "BufferItem; make_experience_batch makes one of items"),
     ([text_item()], "list; make_experience_batch makes one of items")],
)  # fmt: skip
def test_what_is_no_batch_is_refused(given, told):
    for take in (split_experience_batch, strip_padding, NaiveReplayBuffer(1).append):
        with pytest.raises(DataError, match=f"not a batch of experience: {told}"):
            take(given)


# --- every tensor moves --------------------------------------------------------------------------------------------

SHAPES = {Kind.TOKENS: (5,), Kind.ACTIONS: (2,), Kind.NUMBERS: (2,), Kind.SAMPLE: ()}  # of text_item()
EVERY_TENSOR = {
    name: torch.ones(SHAPES[spec.kind])
    for name, spec in replay_fields(BufferItem).items()
    if spec.kind in SHAPES and getattr(text_item(), name) is None
} | {"info": {"reward": 1.0, "metrics": {"format": torch.tensor(1.0)}, "parts": torch.ones(2), "kind": "count"}}


def tensors_of(batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for each in fields(batch):
        map_tensors(getattr(batch, each.name), lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.mark.parametrize(
    "item",
    [
        text_item(**EVERY_TENSOR),
        vision_item(1, 1, video_seconds_per_grid=torch.ones(1), **EVERY_TENSOR),
        diffusion_item(),
    ],
)
def test_every_tensor_moves_and_the_vision_items_have_every_one(item):
    batch = make_experience_batch([item, item])
    if isinstance(item, BufferItemVL):
        kinds = {name: spec.kind for name, spec in replay_fields(ExperienceVL).items()}
        names = [name for name, kind in kinds.items() if kind is not Kind.OBJECTS]
        names += ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "video_seconds_per_grid"]
        assert [name for name in names if getattr(batch, name) is None] == []
    moved = batch.to_device("meta")
    assert moved is batch and len(tensors_of(batch)) > 5
    assert all(tensor.device.type == "meta" for tensor in tensors_of(batch))
