"""Attention over packed rows by segments, equal to a dense mask's, which is never made; of towers, in a few calls."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from equality import adapters, assert_same, loss_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from stock_families import grouped_samples, stock, stock_checkpoint
from tiny_models import QWEN_FAMILIES, actor_of, checkpoint_of, inputs_of, load, prompts_for, rollouts_of, text_prompts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from watched import Operations

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models import attention
from lightrft_visual.models.attention import Segments, segment_attention
from lightrft_visual.models.checkpointed import checkpoint_blocks
from lightrft_visual.models.states import divide_segments
from lightrft_visual.models.vlm.actor import Actor, Backbone
from lightrft_visual.models.vlm.families import family_of
from lightrft_visual.runtime.sequence import SequenceGroup
from lightrft_visual.trainer.features.compiled_blocks import compile_blocks

LENGTHS = [5, 1, 9, 3]
TOTAL = sum(LENGTHS)
# The second and third segment go on from the first, the fourth stands alone.
ALONE, CONTINUED = None, [None, 0, 0, None]


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, TOTAL, 16, generator=generator) for heads in (4, 2, 2)]


def dense(query, key, value, window: int | None = None, scale: float | None = None, continues=ALONE, lengths=LENGTHS):
    """The definition: one mask of the whole row."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    before = torch.tensor([-1 if of is None else of for of in continues or [None] * len(lengths)])[sample]
    place = torch.cat([torch.arange(length) for length in lengths])
    place += torch.where(before < 0, 0, torch.tensor(lengths)[before])  # as if each stood behind what it goes on from
    mask = ((sample[:, None] == sample) & (place[:, None] >= place)) | (before[:, None] == sample)
    if window is not None:
        mask &= place[:, None] - place < window
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True).transpose(1, 2)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_segments_of_any_lengths_equal_a_dense_mask_with_their_gradients(data):
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=9))
    starts = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    first, continues = None, []
    for index, alone in enumerate(starts):
        continues.append(None if alone else first)
        first = index if alone else first
    window = data.draw(st.none() | st.integers(1, 120))
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, heads, sum(lengths), 6, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    segments = Segments(lengths, torch.device("cpu"), continues)
    ours, _ = segment_attention(None, *qkv, segments.mask, segments, sliding_window=window)
    wanted = dense(*qkv, window, None, continues, lengths)
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)
    weights = torch.randn(ours.shape, generator=generator)
    gradients = [torch.autograd.grad((made * weights).sum(), qkv) for made in (ours, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_segments_of_like_lengths_are_one_call_and_of_others_few_with_little_padding():
    alike = Segments([60, *[33] * 8, 60, *[32, 31, 30, 9]], torch.device("cpu"), [None, *[0] * 8, None, *[9] * 4])
    assert [tuple(own.shape) for own, _, _ in alike.batches(None)[0]] == [(12, 33), (2, 60)]
    apart = Segments([1000, 990, 800, 100, 90], torch.device("cpu"))
    assert [tuple(own.shape) for own, _, _ in apart.batches(None)[0]] == [(3, 1000), (2, 100)]


def stand_in(q, k, v, ends_q, ends_k, *_, scale=None, window_size, enable_gqa=False, first=False, causal=False):
    """With the meaning that PyTorch documents for varlen_attn, where the last query sees the last key; or with faults:
    the first query sees the first key, or nothing that follows it."""
    made = []
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist())):
        mask, more = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool), 0 if first else k1 - k0 - (q1 - q0)
        mask = mask.tril(more) if causal or window_size[1] == 0 else mask
        mask = mask if window_size[0] == -1 else mask.triu(more - window_size[0])
        rows = (each.transpose(0, 1).unsqueeze(0) for each in (q[q0:q1], k[k0:k1], v[k0:k1]))
        made.append(F.scaled_dot_product_attention(*rows, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
    return torch.cat(made)


@pytest.mark.parametrize(("continues", "window", "old"), [(ALONE, None, True), (CONTINUED, 4, False)])
def test_the_kernel_of_accelerators_is_given_what_it_takes(qkv, monkeypatch, old, window, continues):
    def kernel(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        assert ends_q.dtype == ends_k.dtype == torch.int32 and enable_gqa and window_size[1] == 0
        assert q.shape == (TOTAL, 4, 16) and k.shape == v.shape == (ends_k[-1], 2, 16)
        assert longest_q == ends_q.diff().max() and longest_k == ends_k.diff().max()
        return stand_in(q, k, v, ends_q, ends_k, scale=scale, window_size=window_size, enable_gqa=True)

    def older(q, k, v, *ends, scale, window_size):
        """As up to PyTorch 2.11: without groups of queries to one key."""
        assert k.shape == v.shape == (ends[1][-1], 4, 16)
        return kernel(q, k[:, ::2], v[:, ::2], *ends, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(attention, "has_varlen_kernel", lambda kind, dtype: True)
    monkeypatch.setattr(varlen, "varlen_attn", older if old else kernel)
    segments = Segments(LENGTHS, torch.device("cpu"), continues)
    ours, _ = segment_attention(None, *qkv, None, segments, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(ours, dense(*qkv, window, 0.3, continues), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("size", "of_values", "taken"), [(192, 128, False), (264, 264, False), (256, 256, True)])
def test_heads_that_the_kernel_of_accelerators_takes_not_are_attended_otherwise(monkeypatch, size, of_values, taken):
    asked = []
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda kind, dtype: True)
    monkeypatch.setattr(attention, "_varlen", lambda *given: asked.append(given))
    query, value = torch.zeros(1, 2, 3, size), torch.zeros(1, 2, 3, of_values)
    made, _ = segment_attention(None, query, query, value, None, Segments([2, 1], query.device))
    assert [made is None, len(asked)] == [taken, taken] and (taken or made.shape == (1, 3, 2, of_values))


@pytest.mark.parametrize("continues", [ALONE, CONTINUED, "windows of a tower"])
def test_pytorchs_own_kernel_takes_the_call_on_cuda(continues):
    """Shapes, types and names alone: tensors that say they are on a GPU and hold nothing."""
    with FakeTensorMode():
        tower = isinstance(continues, str)
        qkv = [torch.empty(1, n, TOTAL, 64, dtype=torch.bfloat16, device="cuda") for n in (4, *[4 if tower else 2] * 2)]
        if tower:
            made = attention.attend_to_all(*qkv, torch.empty(6, dtype=torch.int32, device="cuda"), 5, 0.3)
        else:
            made = attention._varlen(*qkv, Segments(LENGTHS, torch.device("cuda"), continues), 0.3, 4)
    assert made.shape == (1, TOTAL, 4, 64) and made.dtype == torch.bfloat16 and made.device.type == "cuda"


def test_a_device_without_that_kernel_is_given_as_many_heads_of_keys_as_of_queries(monkeypatch):
    """By its documentation PyTorch's attention takes fewer on CUDA by FlashAttention, or writes all scores."""

    def kernel(q, k, v, mask, dropout, *, is_causal, scale, enable_gqa):
        assert q.shape[1] == k.shape[1] == v.shape[1] == 4 and not enable_gqa
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        qkv = [torch.empty(1, heads, TOTAL, 16, device="cuda") for heads in (4, 2, 2)]
        tokens, segments = torch.empty(4, 9, dtype=torch.long, device="cuda"), Segments(LENGTHS, torch.device("cuda"))
        segments._batches[None] = [(tokens, tokens, None)], tokens.flatten()[:TOTAL]
        made = attention._by_batches(*qkv, segments, 0.3, 0.0, None)
    assert made.shape == (1, TOTAL, 4, 16)


@pytest.mark.parametrize("wrong", [{}, {"first": True}, {"causal": True}], ids=str)
def test_a_kernel_that_hides_keys_is_not_used_nor_one_on_the_host_or_in_float32(monkeypatch, wrong):
    attention.has_varlen_kernel.cache_clear()
    assert not attention.has_varlen_kernel("cpu", torch.bfloat16)
    assert not attention.has_varlen_kernel("cuda", torch.float32)
    monkeypatch.setattr(torch, "device", lambda kind: torch._C.device("cpu"))
    monkeypatch.setattr(varlen, "varlen_attn", partial(stand_in, **wrong))
    answer = attention.has_varlen_kernel("cuda", torch.bfloat16)
    attention.has_varlen_kernel.cache_clear()
    assert answer is (not wrong)


@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl"])
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
        with Operations() as operations:
            actor(inputs, ScoringRule())
        found.append(any(shape[-2:] in masks for _, shape, _ in operations.made))
    assert found == [False, True]


def test_a_model_that_does_not_hand_segments_on_is_refused(root):
    checkpoint = checkpoint_of(root, "qwen2")
    actor = actor_of(checkpoint)
    for layer in actor.transformer.model.layers:
        layer.self_attn.config = SimpleNamespace(_attn_implementation="sdpa")
    with pytest.raises(ConfigError, match="does not take segments"):
        actor(inputs_of(checkpoint, rollouts_of(checkpoint, text_prompts()), packed=True), ScoringRule())


# --- windows of vision towers ---------------------------------------------------------------------------------------


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
    assert ours.config._attn_implementation == attention.WINDOWS and plain.config._attn_implementation == "sdpa"
    inputs = tower_inputs(ours)
    calls, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), attend(*a, **k))[1])
    wanted, by_parts = outputs_and_gradients(plain, *inputs), len(calls)
    found = outputs_and_gradients(ours, *inputs)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert len(calls) - by_parts < by_parts


# --- linear attention: each segment of a row begins anew, as it does alone and padded ---

AROUND_CHUNKS = [1, 5, 64, 65, 1, 130, 7]  # around the chunks of 64 tokens and the 4 of the short convolution


def stock_actor(kind: str, how: str = "none", attention: str = "sdpa", wrap=lambda model: model) -> Actor:
    built = stock(kind, attention)
    checkpoint_blocks(built.model, how)
    banned = family_of(built.model.config).banned_ids(built.tokenizer)
    return Actor(wrap(built.model), banned, [1]).train()


@pytest.fixture(scope="module")
def delta_nets(tmp_path_factory):
    return stock_checkpoint(tmp_path_factory.mktemp("models"), "qwen3_5")


def text_rows(lengths: list[int]) -> ModelInputs:
    """Text of samples of these lengths in one row."""
    ids = torch.randint(20, 200, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    actions = torch.zeros(len(lengths), 1, dtype=torch.bool)
    return ModelInputs(ids, torch.ones_like(ids), actions, list(lengths), [0] * len(lengths))


@pytest.mark.parametrize(
    ("kind", "attention"), [("qwen3_5", "sdpa"), ("qwen3_5_moe", "eager"), ("minicpmv4_6", "sdpa")]
)
@torch.no_grad()
def test_segments_of_any_length_are_as_alone(kind, attention):
    actor = stock_actor(kind, attention=attention)
    actor.backbone.stands_in = False  # a blank image for each: not of interest here
    inputs = text_rows(AROUND_CHUNKS)
    found = actor.backbone.hidden_states(inputs).split(AROUND_CHUNKS)
    for part, ids in zip(found, inputs.sequences.split(AROUND_CHUNKS, dim=1)):
        alone = actor.backbone.hidden_states(ModelInputs(ids, torch.ones_like(ids), inputs.action_mask))
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("how", "lora"), [("none", False), ("attention", True), ("full", False)])
def test_packed_and_shared_losses_and_gradients_are_those_of_padded_samples(delta_nets, how, lora):
    wrap = adapters if lora else lambda model: model
    padded, packed = grouped_samples(delta_nets)
    wanted = loss_and_gradients(stock_actor("qwen3_5", wrap=wrap), [padded])
    assert any("linear_attn" in name and gradient.any() for name, gradient in wanted[1].items())
    actor = stock_actor("qwen3_5", how, wrap=wrap)
    for actor.backbone.share_prefix in (False, True):
        assert_same(wanted, loss_and_gradients(actor, [packed]), 1e-5)


def test_samples_hold_each_segment_behind_the_one_that_it_continues():
    segments = Segments([2, 1, 3, 2], torch.device("cpu"), [None, None, 0, 0])
    read, real, back = segments.samples
    assert [row[mask].tolist() for row, mask in zip(read, real)] == [[2], [0, 1, 3, 4, 5], [0, 1, 6, 7]]
    assert read.flatten()[back].tolist() == [*range(8)] and real.flatten()[back].all()
    read, real, back = Segments([1, 3], torch.device("cpu")).samples
    assert real.tolist() == [[True, False, False], [True] * 3] and back.tolist() == [0, 3, 4, 5]


def test_prompts_are_shared_where_asked_for_rows_are_divided_once_and_other_divisions_are_refused():
    model = stock("qwen3_5").model
    family = family_of(model.config)
    assert [family.shares_prompts(wanted, True, "auto") for wanted in (None, True)] == [False, True]
    assert family.sharing_refused("auto") is None
    assert all(Backbone(model).by_segments for _ in range(2))  # one model that two hold
    divide_segments(model.base_model.language_model)
    (state,) = (layer.linear_attn for layer in model.base_model.language_model.layers if hasattr(layer, "linear_attn"))
    assert len(state._forward_pre_hooks) == len(state._forward_hooks) == 1
    with pytest.raises(ConfigError, match="sp_size: linear attention carries a state along the whole row"):
        Actor(model, [], [], sequence=SequenceGroup(2, 0, None, None))
    with pytest.raises(ConfigError, match="PyTorch's attention alone, without experts, not a qwen3_5"):
        compile_blocks(Actor(model, [], []), "eager")
