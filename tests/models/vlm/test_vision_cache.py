"""The vision tower sees each different image once, and nothing else changes."""

import pytest
import torch
from tiny_models import QWEN_FAMILIES
from transformers import AutoModel

from lightrft_visual.models.attention import attend_by_windows
from lightrft_visual.models.tiny.vlm import build_tokenizer, tiny_config
from lightrft_visual.models.vlm.vision_cache import SharedMedia, first_occurrences, read_grids_on_host
from lightrft_visual.runtime.host_copies import to_device


def tower(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModel.from_config(tiny_config(family, build_tokenizer(["a"]), tie_embeddings=False)).double()


def width_of(model: torch.nn.Module) -> int:
    return model.visual.patch_embed.proj.weight[0].numel()


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


@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_a_tower_is_given_what_it_makes_of_its_grids_and_reads_none_of_them_back(family):
    """The device is `meta`, of which nothing can be read."""
    plain, given = tower(family), tower(family)
    pixels, grids = media(width_of(plain))
    grids[3] = torch.tensor([3, 2, 4])  # a video
    for model in (plain, given):
        attend_by_windows(model.visual)
    read_grids_on_host(given.visual)
    made, wanted = (model.visual(pixels, grid_thw=grids) for model in (given, plain))
    assert all(torch.equal(*each) for each in zip(flat(made), flat(wanted), strict=True))
    away = [to_device(each, "meta") for each in (pixels, grids)]
    there = given.visual.to("meta")(away[0], grid_thw=away[1]).pooler_output
    assert there.is_meta and there.shape == wanted.pooler_output.shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        plain.visual.to("meta")(away[0], grid_thw=away[1])


def test_first_occurrences_compares_every_value_and_shape():
    base = torch.arange(4000.0).reshape(40, 100)
    other = base.clone()
    other[39, 98] += 1  # not among the values that are looked at first
    pixels = torch.cat([base, other, base, other, base[:39]])
    assert first_occurrences(pixels, torch.tensor([[1, 4, 10]] * 4 + [[1, 3, 13]])) == [0, 1, 0, 1, 4]
    pixels = torch.full((96, 5), 0.25)  # two flat images of 4 x 6 patches, one of 6 x 4, one video of two frames
    assert first_occurrences(pixels, torch.tensor([[1, 4, 6], [1, 6, 4], [1, 4, 6], [2, 2, 6]])) == [0, 1, 0, 3]


@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_features_and_gradients_are_those_of_the_whole_batch_also_without_repetition(family):
    plain, sharing, seen, found = tower(family), tower(family), [], []
    SharedMedia(sharing.visual)
    sharing.visual.patch_embed.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    pixels, grids = media(width_of(plain))
    for model in (plain, sharing):
        features = flat(model.get_image_features(pixels, grids))
        torch.manual_seed(2)
        sum((each * torch.randn_like(each)).sum() for each in features).backward()
        found.append((features, {name: each.grad for name, each in model.visual.named_parameters()}))
    assert seen == [16 + 16 + 24]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-6)
    # Attention computes in single precision inside, whatever the type of the weights.
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    # Two flat images of two shapes: their values are the same, and their positions are not.
    pixels, grids = torch.full((48, width_of(plain)), 0.25).double(), torch.tensor([[1, 4, 6], [1, 6, 4]])
    features = (flat(model.get_image_features(pixels, grids)) for model in (plain, sharing))
    assert all(torch.equal(*each) for each in zip(*features))
