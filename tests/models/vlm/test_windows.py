"""A tower that attends to all windows in a few calls gives what transformers' own calls give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import actor_of, checkpoint_of, load
from torch._subclasses.fake_tensor import FakeTensorMode

from lightrft_visual.models import attention
from lightrft_visual.models import attention as windows
from lightrft_visual.models.tiny.vlm import QWEN_FAMILIES


def tower_inputs(tower) -> tuple[torch.Tensor, torch.Tensor]:
    """Two equal images, a larger one whose windows at the border are smaller, and a video of two frames."""
    grids = torch.tensor([[1, 4, 4], [1, 4, 4], [1, 10, 6], [2, 4, 6]])
    embed = tower.patch_embed.proj.weight[0].numel()
    return torch.randn(int(grids.prod(1).sum()), embed, generator=torch.Generator().manual_seed(0)), grids


def outputs_and_gradients(tower, pixels, grids) -> list[torch.Tensor]:
    features = tower(pixels, grid_thw=grids).pooler_output
    weights = [p for p in tower.parameters() if p.requires_grad]
    return [features, *torch.autograd.grad(features.sin().sum(), weights, allow_unused=True)]


@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_a_tower_gives_the_same_in_fewer_calls(family, tmp_path, monkeypatch):
    checkpoint = checkpoint_of(tmp_path, family)
    ours, plain = actor_of(checkpoint).model.model.visual, load(checkpoint.path, vision=True).model.visual
    plain.load_state_dict(ours.state_dict())
    assert ours.config._attn_implementation == windows.WINDOWS and plain.config._attn_implementation == "sdpa"
    inputs = tower_inputs(ours)
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), attend(*a, **k))[1])
    wanted, by_parts = outputs_and_gradients(plain, *inputs), len(calls)
    found = outputs_and_gradients(ours, *inputs)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert len(calls) - by_parts < by_parts


def test_parts_of_several_lengths_attend_to_themselves_alone():
    lengths, ends = [3, 5, 3, 1, 5], torch.tensor([0, 3, 8, 11, 12, 17])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 17, 8, requires_grad=True) for _ in range(3))
    parts = zip(*(each.split(lengths, dim=2) for each in (q, k, v)))
    wanted = torch.cat([F.scaled_dot_product_attention(*part, scale=0.3) for part in parts], dim=2).transpose(1, 2)
    found, _ = windows.window_attention(None, q, k, v, None, 0.3, cu_seq_lens_q=ends, max_length_q=5)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad((made * weights).sum(), (q, k, v)) for made in (found, wanted)), atol=1e-6, rtol=1e-5
    )


def test_the_kernel_of_accelerators_takes_the_call():
    """Shapes, types and names alone: tensors that say they are on a GPU and hold nothing."""
    with FakeTensorMode():
        qkv = [torch.empty(1, 4, 17, 80, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        ends = torch.empty(6, dtype=torch.int32, device="cuda")
        made = attention.attend_to_all(*qkv, ends, 5, 0.3)
    assert made.shape == (1, 17, 4, 80) and made.dtype == torch.bfloat16 and made.device.type == "cuda"
