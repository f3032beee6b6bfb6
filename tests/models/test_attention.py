"""Attention over packed rows: by segments, equal to a dense mask's, which is never made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import actor_of, checkpoint_of, inputs_of, prompts_for, rollouts_of, text_prompts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft_visual.batches.sampling import ScoringRule
from lightrft_visual.errors import ConfigError
from lightrft_visual.models import attention
from lightrft_visual.models.attention import Segments, segment_attention

LENGTHS = [5, 1, 9, 3]
TOTAL = sum(LENGTHS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, TOTAL, 16, generator=generator) for heads in (4, 2, 2)]


def dense(query, key, value, window: int | None = None, scale: float | None = None):
    """The definition: one mask of the whole row."""
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(TOTAL)
    mask = (sample[:, None] == sample) & (place[:, None] >= place)
    if window is not None:
        mask &= place[:, None] - place < window
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 100, 4, 1])
def test_segments_equal_a_dense_mask(qkv, window):
    segments = Segments(LENGTHS, torch.device("cpu"))
    for each in qkv:
        each.requires_grad_()
    ours, _ = segment_attention(None, *qkv, segments.mask, segments, scaling=0.3, sliding_window=window)
    wanted = dense(*qkv, window, 0.3)
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((made * weights).sum(), qkv) for made in (ours, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_of_accelerators_is_given_what_it_takes(qkv, monkeypatch, window):
    """A stand-in with the meaning that PyTorch documents for varlen_attn."""

    def kernel(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        assert torch.equal(ends_q, ends_k) and ends_q.dtype == torch.int32 and longest_q == longest_k == max(LENGTHS)
        assert q.shape == (TOTAL, 4, 16) and k.shape == v.shape == (TOTAL, 2, 16) and enable_gqa
        assert ends_q.tolist() == [0, 5, 6, 15, 18] and window_size[1] == 0
        left = None if window_size[0] == -1 else window_size[0] + 1
        rows = [each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)]
        return dense(*rows, left, scale).squeeze(0)

    monkeypatch.setattr(attention, "has_varlen_kernel", lambda kind, dtype: True)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    segments = Segments(LENGTHS, torch.device("cpu"))
    ours, _ = segment_attention(None, *qkv, None, segments, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(ours, dense(*qkv, window, 0.3), atol=1e-6, rtol=1e-6)


def test_pytorchs_own_kernel_takes_the_call_on_cuda():
    """Shapes, types and names alone: tensors that say they are on a GPU and hold nothing."""
    with FakeTensorMode():
        qkv = [torch.empty(1, heads, TOTAL, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)]
        made = attention._varlen(*qkv, Segments(LENGTHS, torch.device("cuda")), 0.3, 4)
    assert made.shape == (1, TOTAL, 4, 64) and made.dtype == torch.bfloat16 and made.device.type == "cuda"


def test_the_host_and_float32_have_no_kernel():
    assert not attention.has_varlen_kernel("cpu", torch.bfloat16)
    assert not attention.has_varlen_kernel("cuda", torch.float32)


class Shapes(TorchDispatchMode):
    """Last two sizes of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.seen |= {tuple(each.shape[-2:]) for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
        return result


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_vl", "qwen2_5_vl", "qwen2_vl", "internvl"])
def test_no_mask_of_a_whole_packed_row_is_made(root, kind):
    checkpoint = checkpoint_of(root, kind)
    prompts = prompts_for(checkpoint)
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, prompts), packed=True)
    total = inputs.sequences.shape[1]
    masks = {(size, size) for size in range(total, total + 5)}  # with the tokens of a blank image, if any
    found = []
    for by_segments in (True, False):
        actor = actor_of(checkpoint)
        if not by_segments:
            actor.backbone.by_segments = False
            getattr(actor.backbone.base, "language_model", actor.backbone.base).config._attn_implementation = "sdpa"
        with Shapes() as shapes:
            actor(inputs, ScoringRule())
        found.append(bool(shapes.seen & masks))
    assert found == [False, True]


def test_a_model_that_does_not_hand_segments_on_is_refused(root):
    checkpoint = checkpoint_of(root, "qwen2")
    actor = actor_of(checkpoint)
    for layer in actor.transformer.model.layers:
        layer.self_attn.config = SimpleNamespace(_attn_implementation="sdpa")
    with pytest.raises(ConfigError, match="does not take segments"):
        actor(inputs_of(checkpoint, rollouts_of(checkpoint, text_prompts()), packed=True), ScoringRule())
