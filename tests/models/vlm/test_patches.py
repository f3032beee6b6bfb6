"""A product in place of the convolution over single patches: the same outputs, gradients and names."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from tiny_models import actor_of, checkpoint_of

from lightrft_visual.models.tiny.vlm import QWEN_FAMILIES
from lightrft_visual.models.vlm.positions import PatchConv3d

KERNEL = (2, 4, 4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_equals_the_convolution(bias):
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, KERNEL, stride=KERNEL, bias=bias).double()
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


def test_only_a_plain_convolution_is_changed():
    for layer in (nn.Conv3d(4, 8, KERNEL, groups=2), nn.Conv3d(3, 8, KERNEL, padding=1), nn.Linear(3, 3)):
        kind = type(layer)
        PatchConv3d.adopt(layer)
        assert type(layer) is kind


@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_the_towers_use_it(tmp_path_factory, family):
    actor = actor_of(checkpoint_of(tmp_path_factory.mktemp("checkpoints"), family))
    assert isinstance(actor.backbone.base.visual.patch_embed.proj, PatchConv3d)
