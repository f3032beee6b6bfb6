"""Attention of a vision tower over the images, frames or windows of a batch, without a call for each of them.

transformers' towers of the Qwen-VL kind call PyTorch's attention once for each image, and in Qwen2.5-VL's windowed
layers once for each window (16 for an image of 448 x 448). They also read the lengths from the device three times a
layer, which on an accelerator waits for all work before it. Here the parts of equal length are one batch of one call,
and the lengths are read once a forward. Where the device has a varlen kernel, all parts are one call of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface

from ..attention import attend_to_all, takes_varlen

T = torch.Tensor

# To functions with "flash" in their name transformers gives the ends of all parts, and not one part after the other.
NAME = "lightrft_visual_flash_windows"


@dataclass
class _Batches:
    """Parts by length. batches: (parts, length, their tokens in order, None for all tokens as they lie);
    back: where each token's result lies among those of all batches."""

    batches: list[tuple[int, int, T | None]]
    back: T | None


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the ends of the parts, one tensor a forward -> _Batches


def attend_by_windows(tower: nn.Module) -> None:
    """Let a transformers vision tower with PyTorch's attention attend in this way; others stay as they are."""
    if getattr(tower.config, "_attn_implementation", None) == "sdpa":
        tower.config._attn_implementation = NAME


def window_attention(
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
    if not dropout and takes_varlen(query):
        return attend_to_all(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    plan = _known.get(cu_seq_lens_q)
    if plan is None:
        plan = _known[cu_seq_lens_q] = _batches(cu_seq_lens_q)
    made = [_attend(query, key, value, *batch, scaling, dropout) for batch in plan.batches]
    together = made[0] if plan.back is None else torch.cat(made)[plan.back]
    return together.unsqueeze(0), None


def _batches(ends: T) -> _Batches:
    bounds = ends.tolist()
    parts: dict[int, list[int]] = defaultdict(list)  # length -> first tokens
    for start, end in zip(bounds, bounds[1:]):
        if end > start:
            parts[end - start].append(start)
    if len(parts) == 1:
        ((length, starts),) = parts.items()
        return _Batches([(len(starts), length, None)], None)
    tokens = {
        length: (torch.tensor(starts)[:, None] + torch.arange(length)).flatten() for length, starts in parts.items()
    }
    back = torch.cat(list(tokens.values())).argsort()
    batches = [(len(parts[length]), length, each.to(ends.device)) for length, each in tokens.items()]
    return _Batches(batches, back.to(ends.device))


def _attend(
    query: T, key: T, value: T, parts: int, length: int, tokens: T | None, scale: float | None, dropout: float
) -> T:
    """(parts * length, heads, D): the attention of parts of one length, each over itself."""
    flattened = (each.squeeze(0) if tokens is None else each.squeeze(0)[:, tokens] for each in (query, key, value))
    q, k, v = (each.unflatten(1, (parts, length)).transpose(0, 1) for each in flattened)
    made = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    return made.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(NAME, window_attention)
