"""Causal attention over packed rows: each sample attends to itself alone, and no mask of the whole row is ever made.

A mask over a packed row of T tokens has T * T entries, nearly all of them false. Here attention runs over the segments:
on an accelerator with a kernel for sequences of several lengths (FlashAttention 2, arXiv 2307.08691, where its package
is installed, else PyTorch's own `varlen_attn`), elsewhere by PyTorch's attention over padded batches of segments.

A segment may continue another one, as the completions of one prompt do: its tokens attend to all of that prompt and to
those before them in their own segment. The prompt's keys and values are then computed once and read by each of them.

A vision tower attends to the images, frames or windows of a batch (`_window_attention`). transformers' towers of the
Qwen-VL kind call PyTorch's attention once for each image, and in Qwen2.5-VL's windowed layers once for each window
(16 for an image of 448 x 448). They also read the lengths from the device three times a layer, which on an
accelerator waits for all work before it. Here the parts of equal length are one batch of one call, and the lengths
are read once a forward. Where the device has a varlen kernel, all parts are one call of it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from ..runtime.host_copies import on_host, to_device
from ..runtime.sequence import SequenceGroup
from .states import divide_segments

T = torch.Tensor

logger = logging.getLogger(__name__)

NAME = "lightrft_visual_segments"  # in transformers' table of attention functions
LARGEST_HEAD = 256  # of FlashAttention and of PyTorch's varlen kernel
_PROBE_TOLERANCE = 0.05  # of values in -1..1 at half precision; keys that are left out or let in change them by more


@dataclass
class Segments:
    """The parts of one packed row. lengths: their tokens, in order; device: where the row is.

    continues: for each segment the index of the one that it goes on from, None for one that stands alone; without the
    list all stand alone. A segment that others continue stands alone itself, and before them.
    group: the ranks that hold the row together, each a slice of its tokens; None where this rank has all of them.
    """

    lengths: list[int]
    device: torch.device
    continues: list[int | None] | None = None
    group: SequenceGroup | None = None
    used: bool = False
    _batches: dict[int | None, tuple[list[tuple[T, T, T | None]], T]] = field(default_factory=dict, repr=False)

    @cached_property
    def ends(self) -> T:
        """(segments + 1) int32: 0 and the end of each, on the device."""
        return self._ends(self.lengths)

    @cached_property
    def key_lengths(self) -> list[int]:
        """How many keys each segment reads: its own and those of the segment that it continues."""
        return [own + (0 if of is None else self.lengths[of]) for own, of in zip(self.lengths, self._continues)]

    @cached_property
    def key_ends(self) -> T:
        """(segments + 1) int32: 0 and the end of each segment's keys in `keys`."""
        return self._ends(self.key_lengths)

    @cached_property
    def keys(self) -> T | None:
        """(sum of key_lengths) long: the tokens of the row that each segment reads, in order; None for the row as it
        is."""
        if self.continues is None:
            return None
        tokens = torch.arange(sum(self.lengths)).split(self.lengths)
        read = [
            part for own, of in zip(tokens, self._continues) for part in ([own] if of is None else [tokens[of], own])
        ]
        return to_device(torch.cat(read), self.device)

    @cached_property
    def samples(self) -> tuple[T, T, T]:
        """The segments as padded samples, each behind the one that it continues; those have no sample of their own.

        (samples, longest) long: which token of the row is where, at padding any; the same in bool: where a token is;
        (tokens) long: where in the flattened samples each token of the row is, of a continued segment in one of them.
        """
        tokens, continued = torch.arange(sum(self.lengths)).split(self.lengths), {*self._continues}
        parts = [
            own if of is None else torch.cat([tokens[of], own])
            for index, (own, of) in enumerate(zip(tokens, self._continues))
            if index not in continued
        ]
        real = pad_sequence([torch.ones_like(part, dtype=torch.bool) for part in parts], batch_first=True)
        # Padding reads all tokens in turn: a gradient that many would add to one, though 0, waits on a device.
        where = torch.arange(real.numel()).view_as(real)
        read, back = where % sum(self.lengths), torch.empty(sum(self.lengths), dtype=torch.long)
        read[real] = torch.cat(parts)
        back[read[real]] = where[real]
        return to_device(read, self.device), to_device(real, self.device), to_device(back, self.device)

    def followed_by(self, count: int) -> Segments:
        """The same with `count` tokens behind it that stand alone."""
        return Segments([*self.lengths, count], self.device, self.continues and [*self.continues, None], self.group)

    @property
    def _continues(self) -> list[int | None]:
        return self.continues or [None] * len(self.lengths)

    def _ends(self, lengths: list[int]) -> T:
        return to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), self.device)

    def batches(self, window: int | None) -> tuple[list[tuple[T, T, T | None]], T]:
        """The segments in few padded batches: of such as read equally many tokens before their own, and of like length.

        Of each batch (segments, longest) long, which tokens of the row ask, (segments, before + longest) long, which
        are read, and (longest, before + longest) bool, which of these each sees: window in all, None for all up to
        itself. Then (tokens) long: where in the flattened batches each token of the row is. Padding is behind the
        tokens of its segment, so that none of them sees it, and reads the tokens that follow in the row.
        """
        if window in self._batches:
            return self._batches[window]
        starts, last, order = list(accumulate(self.lengths, initial=0)), (-1, 0), []
        alike: list[tuple[tuple[int, int], list[tuple[int, ...]]]] = []
        for start, length, of in zip(starts, self.lengths, self._continues):
            order.append((0, length, start, 0) if of is None else (self.lengths[of], length, start, starts[of]))
        for before, length, *places in sorted(order, reverse=True):
            # A fifth of padding, or 32 tokens for each segment, costs less than a further call.
            if before != last[0] or last[1] > 1.25 * length + 32:
                last = before, length
                alike.append((last, []))
            alike[-1][1].append((length, *places))
        found, back, done = [], torch.empty(starts[-1], dtype=torch.long), 0
        for (before, longest), batch in alike:
            lengths, first, continued = torch.tensor(batch).T[..., None]
            own = (first + torch.arange(longest)).clamp(max=starts[-1] - 1)
            real = torch.arange(longest) < lengths
            back[own[real]] = torch.arange(done, done + own.numel()).view_as(own)[real]
            read, mask, done = torch.cat([continued + torch.arange(before), own], dim=1), None, done + own.numel()
            if before or window is not None:
                mask = torch.ones(longest, before + longest, dtype=torch.bool).tril(before)
                mask = to_device(mask if window is None else mask.triu(before + 1 - window), self.device)
            found.append((to_device(own, self.device), to_device(read, self.device), mask))
        self._batches[window] = found, to_device(back, self.device)
        return self._batches[window]

    @property
    def mask(self) -> T:
        """What models are given as attention mask: four dimensions, so that they make none themselves; never read."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)


def attend_by_segments(model: nn.Module) -> bool:
    """Let the text layers of a transformers base model take `segments`; whether its attention does.

    Only where it uses PyTorch's attention: FlashAttention finds segments by itself, and eager is asked for to see
    masks. Layers with a state always do. Calls without segments stay as they were.
    """
    text = getattr(model, "language_model", model)
    divide_segments(text)
    if text.config._attn_implementation == "sdpa":
        text.config._attn_implementation = NAME
    return text.config._attn_implementation == NAME


def segment_attention(
    module: nn.Module,
    query: T,
    key: T,
    value: T,
    attention_mask: T | None,
    segments: Segments | None = None,
    prompts: Any = None,
    **kwargs,
) -> tuple[T, None]:
    """transformers' attention function; without segments and prompts its `sdpa`.

    Args:
        module: the attention layer.
        query: (1, heads, T, D).
        key, value: (1, key heads, T, D).
        attention_mask: not looked at with segments.
        segments: each token attends to those before it in its own and to the segment that this one continues.
        prompts: engine hf's, held apart from the responses; they say what the next token of each reads, and query is
            then (R, heads, 1, D).
        kwargs: the layer's scaling, dropout and sliding_window.

    Returns:
        (1, T, heads, D), and None in the place of the weights.
    """
    if prompts is not None:
        return prompts.attend(module.layer_idx, query, key, value, kwargs.get("scaling")), None
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return (_attend if segments.group is None else _over_ranks)(query, key, value, segments, kwargs), None


@torch.compiler.disable  # other segments in every batch: a program would be of their lengths
def _attend(query: T, key: T, value: T, segments: Segments, given: dict[str, Any]) -> T:
    segments.used = True
    window, scale, dropout = given.get("sliding_window"), given.get("scaling"), given.get("dropout", 0.0)
    if window is not None and window >= max(segments.key_lengths):
        window = None
    if not dropout and takes_varlen(query, value):
        return _varlen(query, key, value, segments, scale, window)
    return _by_batches(query, key, value, segments, scale, dropout, window)


def _over_ranks(query: T, key: T, value: T, segments: Segments, given: dict[str, Any]) -> T:
    """Slices of the tokens with all heads -> the same of the result: in between each rank has all tokens of some heads.

    By DeepSpeed's Ulysses (arXiv 2309.14509). Where the ranks do not share out the heads of keys evenly, each head is
    repeated as often as it takes, so that queries stay on the rank of their key.
    """
    heads, repeats = key.shape[1], 1
    while heads * repeats % segments.group.size:
        repeats += 1
    if query.shape[1] % (heads * repeats):  # as many as queries fit any split that these fit
        repeats = query.shape[1] // heads
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))

    def attend(*whole: T) -> T:
        return _attend(*(each.transpose(1, 2) for each in whole), segments, given)

    exchange = DistributedAttention(attend, segments.group.tensors, scatter_idx=2, gather_idx=1)
    return exchange(*(each.transpose(1, 2) for each in (query, key, value)), batch_dim_idx=0)


def _by_batches(
    query: T, key: T, value: T, segments: Segments, scale: float | None, dropout: float, window: int | None
) -> T:
    """A call of PyTorch's attention for each batch of segments: many calls of few tokens cost more than padding."""
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if query.shape[1] != key.shape[1] and query.device.type not in ("cpu", "meta"):
        # Of a device's kernels only FlashAttention takes several queries to a key; else all scores would be written.
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    grouped, made, (batches, back) = query.shape[1] != key.shape[1], [], segments.batches(window)
    for own, read, mask in batches:
        q = query.index_select(0, own.flatten()).unflatten(0, own.shape).transpose(1, 2)
        k = key.index_select(0, read.flatten()).unflatten(0, read.shape).transpose(1, 2)
        v = value.index_select(0, read.flatten()).unflatten(0, read.shape).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        made.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(made).index_select(0, back).unsqueeze(0)


def _varlen(query: T, key: T, value: T, segments: Segments, scale: float | None, window: int | None) -> T:
    """By one call: the kernels let the last query of a segment see its last key, the one before the one before."""
    q, k, v = (each.squeeze(0).transpose(0, 1).contiguous() for each in (query, key, value))
    if segments.keys is not None:
        k, v = k[segments.keys], v[segments.keys]
    left = -1 if window is None else window - 1
    longest = max(segments.lengths), max(segments.key_lengths)
    return _kernel(q, k, v, (segments.ends, segments.key_ends), longest, scale, causal=True, left=left)


def attend_to_all(query: T, key: T, value: T, ends: T, longest: int, scale: float | None) -> T:
    """(1, T, heads, D): by one call each part of a row attends to all of itself. Only where `takes_varlen`.

    Args:
        query, key, value: (1, heads, T, D) each.
        ends: (parts + 1) 0 and the end of each.
        longest: tokens of the longest part.
        scale: of the scores; None: 1 / sqrt(D).
    """
    q, k, v = (each.squeeze(0).transpose(0, 1).contiguous() for each in (query, key, value))
    ends = ends.to(torch.int32)
    return _kernel(q, k, v, (ends, ends), (longest, longest), scale, causal=False, left=-1)


def _kernel(
    q: T, k: T, v: T, ends: tuple[T, T], longest: tuple[int, int], scale: float | None, *, causal: bool, left: int
) -> T:
    """q (T, heads, D), k and v (keys, key heads, D) -> (1, T, heads, D) by the device's varlen kernel."""
    window = (left, 0 if causal else -1)
    if is_flash_attn_2_available():
        from flash_attn import flash_attn_varlen_func

        made = flash_attn_varlen_func(
            q, k, v, *ends, *longest, softmax_scale=scale, causal=causal, window_size=window,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return made.unsqueeze(0)
    from torch.nn.attention.varlen import varlen_attn

    settings: dict[str, bool] = {}
    if (queries_a_key := q.shape[1] // k.shape[1]) > 1:
        if "enable_gqa" in signature(varlen_attn).parameters:
            settings["enable_gqa"] = True
        else:  # up to PyTorch 2.11 the kernel wants as many heads of keys as of queries
            k, v = (each.repeat_interleave(queries_a_key, dim=1) for each in (k, v))
    return varlen_attn(q, k, v, *ends, *longest, scale=scale, window_size=window, **settings).unsqueeze(0)


def takes_varlen(query: T, value: T) -> bool:
    """Whether a varlen kernel of the device takes queries and values of this precision and these sizes of heads."""
    size = query.shape[-1]
    fitting = size % 8 == 0 and size <= LARGEST_HEAD and value.shape[-1] == size
    return fitting and has_varlen_kernel(query.device.type, query.dtype)


@cache
def has_varlen_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this kind of device has a kernel for segments in this precision that continue one another, and for parts
    that attend to all of themselves, as in a vision tower.

    Tried once on small ones: kernels differ in which keys they let the queries of a shorter segment see, and in how
    they are told that nothing is hidden, so what it gives is held against PyTorch's attention of each segment and part.
    """
    if device_type in ("cpu", "meta") or dtype not in (torch.float16, torch.bfloat16):
        return False
    device = torch.device(device_type)
    probe = torch.arange(2 * 24 * 64, device=device).sin().to(dtype).view(1, 2, 24, 64)
    tried = (probe, probe[:, :1], probe[:, :1])  # two heads of queries to one of keys, as most models have them
    segments = Segments([8, 12, 4], device, [None, 0, 0])
    try:
        made = _varlen(*tried, segments, None, None), attend_to_all(*[probe] * 3, segments.ends, 12, None)
    except (ImportError, NotImplementedError, RuntimeError, TypeError) as error:  # no such kernel, or one too old
        logger.warning(f"no varlen attention kernel: {error}; packed samples are padded for attention, which is slower")
        return False
    parts = [F.scaled_dot_product_attention(part, part, part) for part in probe.float().split(segments.lengths, dim=2)]
    wanted = (
        _by_batches(*(each.float() for each in tried), segments, None, 0.0, None),
        torch.cat(parts, dim=2).transpose(1, 2),
    )
    right = all(bool((ours - theirs).abs().max() < _PROBE_TOLERANCE) for ours, theirs in zip(made, wanted))
    if not right:
        logger.warning("the varlen attention kernel reads other keys than it should; packed samples are padded")
    return right


AttentionInterface.register(NAME, segment_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


# To functions with "flash" in their name transformers gives the ends of all parts, and not one part after the other.
WINDOWS = "lightrft_visual_flash_windows"


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # ends of the parts, one tensor a forward -> parts by length


def attend_by_windows(tower: nn.Module) -> None:
    """Let a transformers vision tower with PyTorch's attention attend in this way; others stay as they are."""
    if getattr(tower.config, "_attn_implementation", None) == "sdpa":
        tower.config._attn_implementation = WINDOWS


@torch.compiler.disable  # it reads the ends of the parts
def _window_attention(
    module: nn.Module,
    query: T,
    key: T,
    value: T,
    attention_mask: T | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: T,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[T, None]:
    """transformers' attention function: query, key, value (1, heads, tokens, D) -> (1, tokens, heads, D).

    cu_seq_lens_q: (parts + 1) 0 and the end of each part; a token attends to all of its own part. max_length_q: the
    tokens of the longest part.
    """
    if not dropout and takes_varlen(query, value):
        return attend_to_all(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    plan = _known.get(cu_seq_lens_q)
    if plan is None:
        plan = _known[cu_seq_lens_q] = _parts_by_length(cu_seq_lens_q)
    made, (batches, back) = [], plan
    for parts, length, tokens in batches:  # (parts * length, heads, D): parts of one length, each over itself
        flattened = (each.squeeze(0) if tokens is None else each.squeeze(0)[:, tokens] for each in (query, key, value))
        q, k, v = (each.unflatten(1, (parts, length)).transpose(0, 1) for each in flattened)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        made.append(attended.transpose(1, 2).flatten(0, 1))
    together = made[0] if back is None else torch.cat(made)[back]
    return together.unsqueeze(0), None


def _parts_by_length(ends: T) -> tuple[list[tuple[int, int, T | None]], T | None]:
    """(number of parts, length, their tokens in order) of each length, and where each token's result lies among those
    of all; None where all parts have one length, and lie as they are."""
    bounds = on_host(ends).tolist()
    parts: dict[int, list[int]] = defaultdict(list)  # length -> first tokens
    for start, end in zip(bounds, bounds[1:]):
        if end > start:
            parts[end - start].append(start)
    if len(parts) == 1:
        ((length, starts),) = parts.items()
        return [(len(starts), length, None)], None
    tokens = {
        length: (torch.tensor(starts)[:, None] + torch.arange(length)).flatten() for length, starts in parts.items()
    }
    back = torch.cat(list(tokens.values())).argsort()
    return [(len(parts[n]), n, each.to(ends.device)) for n, each in tokens.items()], back.to(ends.device)


AttentionInterface.register(WINDOWS, _window_attention)
