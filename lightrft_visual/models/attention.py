"""Causal attention over packed rows: each sample attends to itself alone, and no mask of the whole row is ever made.

A mask over a packed row of T tokens has T * T entries, nearly all of them false. Here attention runs over the segments:
on an accelerator with a kernel for sequences of several lengths (FlashAttention 2, arXiv 2307.08691, where its package
is installed, else PyTorch's own `varlen_attn`), elsewhere by one call of PyTorch's attention for each segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from ..errors import ConfigError

T = torch.Tensor

NAME = "lightrft_visual_segments"  # in transformers' table of attention functions


@dataclass
class Segments:
    """The samples of one packed row. lengths: their tokens, in order; device: where the row is."""

    lengths: list[int]
    device: torch.device
    used: bool = False

    @cached_property
    def ends(self) -> T:
        """(samples + 1) int32: 0 and the end of each, on the device."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.device, torch.int32)

    @property
    def mask(self) -> T:
        """What models are given as attention mask: four dimensions, so that they make none themselves; never read."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)

    def check_used(self) -> None:
        """Raise ConfigError when a forward did not come here: its samples would have attended to each other."""
        if not self.used:
            raise ConfigError("this model's attention does not take segments: train it padded, without packing_samples")


def attend_by_segments(model: nn.Module) -> bool:
    """Let the text layers of a transformers base model take `segments`; whether it does.

    Only where it uses PyTorch's attention: FlashAttention finds segments by itself, and eager is asked for to see
    masks. Calls without segments stay as they were.
    """
    text = getattr(model, "language_model", model)
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
    **kwargs,
) -> tuple[T, None]:
    """transformers' attention function: query (1, heads, T, D), key and value (1, key heads, T, D) -> (1, T, heads, D).

    With segments each token attends to those before it in its own segment, and attention_mask is not looked at; without
    them this is transformers' `sdpa`.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    segments.used = True
    window = kwargs.get("sliding_window")
    if window is not None and window >= max(segments.lengths):
        window = None
    settings = {"scale": kwargs.get("scaling"), "dropout": kwargs.get("dropout", 0.0), "window": window}
    if not settings["dropout"] and has_varlen_kernel(query.device.type, query.dtype):
        return _varlen(query, key, value, segments, settings["scale"], window), None
    return _one_by_one(query, key, value, segments, **settings), None


def _one_by_one(
    query: T, key: T, value: T, segments: Segments, scale: float | None, dropout: float, window: int | None
) -> T:
    parts = []
    for q, k, v in zip(*(each.split(segments.lengths, dim=2) for each in (query, key, value))):
        mask = None if window is None else _window_mask(q.shape[2], window, q.device)
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _window_mask(length: int, window: int, device: torch.device) -> T:
    """(length, length) bool: a token and the window - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _varlen(query: T, key: T, value: T, segments: Segments, scale: float | None, window: int | None) -> T:
    q, k, v = (each.squeeze(0).transpose(0, 1).contiguous() for each in (query, key, value))
    ends, longest, left = segments.ends, max(segments.lengths), -1 if window is None else window - 1
    if is_flash_attn_2_available():
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, softmax_scale=scale, causal=True, window_size=(left, 0)
        ).unsqueeze(0)
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q, k, v, ends, ends, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1]
    ).unsqueeze(0)


@cache
def has_varlen_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this kind of device has a kernel for segments in this precision; tried once on small ones."""
    if device_type == "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return False
    device = torch.device(device_type)
    probe = torch.zeros(1, 1, 16, 64, dtype=dtype, device=device)
    try:
        _varlen(probe, probe, probe, Segments([8, 8], device), None, None)
    except (ImportError, NotImplementedError, RuntimeError, TypeError):  # no such kernel here, or an older PyTorch's
        return False
    return True


AttentionInterface.register(NAME, segment_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
