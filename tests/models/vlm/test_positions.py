"""Position ids by hand, and against transformers where it agrees with the models' training."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import QWEN_FAMILIES, actor_of, checkpoint_of
from transformers import AutoModel

from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.tiny.vlm import build_tokenizer, tiny_config
from lightrft_visual.models.vlm.families import VLMFamily
from lightrft_visual.models.vlm.positions import MRopePositions, PatchConv3d, text_positions


@cache
def base_of(family):
    return AutoModel.from_config(tiny_config(family, build_tokenizer(["a"]), tie_embeddings=False))


def grid(*rows):
    return torch.tensor(rows)


def test_text_positions():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert text_positions(ModelInputs(mask, mask, mask)).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0]]
    row = torch.ones(1, 6)
    assert text_positions(ModelInputs(row, row, row, [3, 1, 2])).tolist() == [[0, 1, 2, 0, 0, 1]]


def test_token_types_name_text_images_and_videos():
    family = SimpleNamespace(image_token_id=8, video_token_id=9)
    types = VLMFamily.token_types(family, torch.tensor([[7, 8, 8, 1, 8, 9]]))
    assert types.tolist() == [[0, 1, 1, 0, 1, 2]] and types.dtype == torch.int32
    family.image_token_id = None
    assert VLMFamily.token_types(family, torch.tensor([[7, 8]])).tolist() == [[0, 0]]


VIDEO = [0, 2, 2, 2, 0, 0]
FRAMES = [
    ("qwen2_vl", None, [1, 2, 3], 4),
    ("qwen2_vl", 5.0, [1, 2, 3], 4),  # does not place frames by time
    ("qwen2_5_vl", None, [1, 3, 5], 6),  # two positions a second, one second apart
    ("qwen2_5_vl", 2.0, [1, 5, 9], 10),
    ("qwen2_5_vl", 0.75, [1, 2, 4], 5),  # 0, 1.5 and 3, cut to whole positions
]


@pytest.mark.parametrize(
    ("family", "types", "images", "videos", "seconds", "wanted"),
    [
        (  # an image of two by three tokens
            "qwen2_vl", [0, 0, *[1] * 6, 0, 0], grid([1, 4, 6]), None, None,
            [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]],
        ),
        (  # frames between the tokens of their times
            "qwen3_vl", [0, 2, 2, 0, 2, 2, 0], None, grid([2, 2, 4]), None,
            [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]],
        ),
        *(  # text goes on above the last frame
            (family, VIDEO, None, grid([3, 2, 2]), seconds and torch.tensor([seconds]),
             [[0, *times, after, after + 1], *[[0, 1, 1, 1, after, after + 1]] * 2])
            for family, seconds, times, after in FRAMES
        ),
    ],
)  # fmt: skip
def test_positions_in_time_height_and_width_by_hand(family, types, images, videos, seconds, wanted):
    found = MRopePositions(base_of(family))(torch.tensor(types), images, videos, seconds)
    assert found.tolist() == wanted


def test_known_patterns_are_not_worked_out_again_and_differ_by_grid_and_time():
    base, calls = base_of("qwen2_5_vl"), []

    def get_rope_index(input_ids, mm_token_type_ids, second_per_grid_ts=None, **grids):
        calls.append(len(input_ids))
        return base.get_rope_index(input_ids, mm_token_type_ids, second_per_grid_ts=second_per_grid_ts, **grids)

    positions = MRopePositions(SimpleNamespace(get_rope_index=get_rope_index), capacity=10)
    types = torch.tensor([0, 2, 2, 0])
    cases = [(grid([2, 2, 2]), torch.tensor([1.0])), (grid([2, 2, 2]), torch.tensor([3.0])), (grid([1, 2, 4]), None)]
    first = [positions(types, None, *case) for case in cases]
    longer = positions(torch.cat([types, types.new_zeros(5)]), None, *cases[0])
    assert len(calls) == 3 and torch.equal(longer[:, :4], first[0])
    assert longer[0].tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert len({str(each.tolist()) for each in first}) == 3
    positions(types, None, grid([2, 2, 2]), torch.tensor([9.0]))
    positions(types, None, *cases[1])
    assert len(calls) == 5 and len(positions.known) == 3 and positions.tokens == 9  # of three each


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["image", "frame"]), st.integers(1, 4), st.integers(1, 4)),
        max_size=4,
    ),
    tail=st.integers(0, 3),
)
@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_images_and_single_frames_are_where_transformers_puts_them(family, blocks, tail):
    base = base_of(family)
    types, images, videos = [], [], []
    for text, kind, height, width in blocks:
        types += [0] * text + [1 if kind == "image" else 2] * (height * width)
        (images if kind == "image" else videos).append([1, 2 * height, 2 * width])
    types = torch.tensor(types + [0] * (tail + 1))
    images, videos = (torch.tensor(rows) if rows else None for rows in (images, videos))
    theirs, _ = base.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.long), types.int().unsqueeze(0), image_grid_thw=images,
        video_grid_thw=videos,
    )  # fmt: skip
    assert torch.equal(MRopePositions(base)(types, images, videos), theirs[:, 0])


# --- the convolution over patches --------------------------------------------------------------------------------


KERNEL = (2, 4, 4)


def test_a_product_equals_the_convolution():
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, KERNEL, stride=KERNEL).double()
    ours = copy.deepcopy(plain)
    PatchConv3d.adopt(ours)
    assert isinstance(ours, PatchConv3d) and ours.state_dict().keys() == plain.state_dict().keys()
    for shape in ((5, 3, *KERNEL), (2, 3, 4, 8, 4)):
        found = []
        for layer in (plain, ours):
            patches = torch.randn(
                shape, dtype=torch.double, generator=torch.Generator().manual_seed(1)
            ).requires_grad_()
            output = layer(patches)
            found.append([output, *torch.autograd.grad(output.sin().sum(), [patches, *layer.parameters()])])
        torch.testing.assert_close(*found)


def test_only_a_plain_convolution_is_changed(root):
    for layer in (nn.Conv3d(4, 8, KERNEL, groups=2), nn.Conv3d(3, 8, KERNEL, padding=1), nn.Linear(3, 3)):
        kind = type(layer)
        PatchConv3d.adopt(layer)
        assert type(layer) is kind
    for family in QWEN_FAMILIES:
        tower = actor_of(checkpoint_of(root, family)).backbone.base.visual
        assert isinstance(tower.patch_embed.proj, PatchConv3d)
