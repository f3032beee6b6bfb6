"""The vision tower sees each different image once, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLConfig, Qwen2VLModel, Qwen3VLConfig, Qwen3VLModel

from lightrft_visual.models.vlm.vision_cache import SharedMedia, first_occurrences

TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
    num_key_value_heads=2, rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
)  # fmt: skip
VISION = {
    "qwen2_vl": dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2),
    "qwen2_5_vl": dict(
        depth=2, hidden_size=32, out_hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, window_size=16,
        fullatt_block_indexes=[1],
    ),
    "qwen3_vl": dict(
        depth=2, hidden_size=32, out_hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4,
        num_position_embeddings=16, deepstack_visual_indexes=[0],
    ),
}  # fmt: skip
FAMILIES = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLModel),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLModel),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLModel),
}


def tower(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    return model_class(config_class(text_config=TEXT, vision_config=VISION[family])).double()


def media(width: int):
    """Five images, 0 = 2 = 4 and 1, 3 alone; 3 has another size, and the same first values as 0."""
    torch.manual_seed(1)
    first, second = torch.randn(16, width).double(), torch.randn(16, width).double()
    third = torch.cat([first, first[:8]])
    pixels = torch.cat([first, second, first, third, first])
    return pixels, torch.tensor([[1, 4, 4], [1, 4, 4], [1, 4, 4], [1, 4, 6], [1, 4, 4]])


def flat(output) -> list[torch.Tensor]:
    features = [*output.pooler_output]
    for each in getattr(output, "deepstack_features", None) or []:
        features += each
    return [*features, output.last_hidden_state]


def test_first_occurrences_compares_every_value():
    base = torch.arange(4000.0).reshape(40, 100)
    other = base.clone()
    other[39, 98] += 1  # not among the values that are looked at first
    pixels = torch.cat([base, other, base, other, base[:39]])
    grids = torch.tensor([[1, 4, 10]] * 4 + [[1, 3, 13]])
    assert first_occurrences(pixels, grids) == [0, 1, 0, 1, 4]


def test_the_same_values_in_another_shape_are_another_image():
    pixels = torch.full((96, 5), 0.25)  # two flat images of 4 x 6 patches, one of 6 x 4, one video of two frames
    grids = torch.tensor([[1, 4, 6], [1, 6, 4], [1, 4, 6], [2, 2, 6]])
    assert first_occurrences(pixels, grids) == [0, 1, 0, 3]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flat_images_of_two_shapes_keep_their_own_features(family):
    model = tower(family)
    pixels = torch.full((48, 3 * 2 * 4 * 4), 0.25).double()
    grids = torch.tensor([[1, 4, 6], [1, 6, 4]])
    expected = flat(model.get_image_features(pixels, grids))
    SharedMedia(model.visual)
    for one, other in zip(expected, flat(model.get_image_features(pixels, grids))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_features_and_gradients_are_those_of_the_whole_batch(family):
    plain, sharing = tower(family), tower(family)
    SharedMedia(sharing.visual)
    seen = []
    sharing.visual.patch_embed.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    pixels, grids = media(3 * 2 * 4 * 4)
    torch.manual_seed(2)
    weights = None
    for model in (plain, sharing):
        features = flat(model.get_image_features(pixels, grids))
        weights = weights or [torch.randn_like(each) for each in features]
        sum((a * b).sum() for a, b in zip(features, weights)).backward()
        model.features = features
    assert seen == [16 + 16 + 24]
    for one, other in zip(plain.features, sharing.features):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    for (name, one), other in zip(plain.visual.named_parameters(), sharing.visual.parameters()):
        # Attention computes in single precision inside, whatever the type of the weights.
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_a_batch_without_repetition_is_passed_on_as_it_is():
    model = tower("qwen2_5_vl")
    pixels, grids = media(3 * 2 * 4 * 4)
    expected = flat(model.get_image_features(pixels[:32], grids[:2]))
    SharedMedia(model.visual)
    for one, other in zip(expected, flat(model.get_image_features(pixels[:32], grids[:2]))):
        assert torch.equal(one, other)
