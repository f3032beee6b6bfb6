"""Layers of diffusers with the same values in fewer operations: attention over image and text, frozen RMS norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn

T = torch.Tensor


class JointAttention:
    """In the place of diffusers' `JointAttnProcessor2_0`: the same values and gradients.

    Image and text are joined as they lie in memory, before heads come to the front, and parted by a split, whose
    backward writes one tensor; that of two slices writes two, mostly zeros, and adds them.
    """

    def __call__(
        self, attn: Attention, hidden_states: T, encoder_hidden_states: T | None = None, *_: Any, **__: Any
    ) -> T | tuple[T, T]:
        """(B, N, D), and with text (B, L, D) both."""

        def heads(states: T, norm: nn.Module | None = None) -> T:
            apart = states.unflatten(-1, (attn.heads, -1))
            return apart if norm is None else norm(apart)

        query = heads(attn.to_q(hidden_states), attn.norm_q)
        key = heads(attn.to_k(hidden_states), attn.norm_k)
        value = heads(attn.to_v(hidden_states))
        if encoder_hidden_states is not None:
            query = torch.cat([query, heads(attn.add_q_proj(encoder_hidden_states), attn.norm_added_q)], dim=1)
            key = torch.cat([key, heads(attn.add_k_proj(encoder_hidden_states), attn.norm_added_k)], dim=1)
            value = torch.cat([value, heads(attn.add_v_proj(encoder_hidden_states))], dim=1)
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)))
        mixed = mixed.transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return self._out(attn, mixed)
        image, text = mixed.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return self._out(attn, image), text if attn.context_pre_only else attn.to_add_out(text)

    def _out(self, attn: Attention, states: T) -> T:
        for layer in attn.to_out:  # a projection and a dropout
            states = layer(states)
        return states


class _ScaledToUnit(torch.autograd.Function):
    """x / rms(x) * weight with one node of the graph in place of eight; the weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: T, weight: T, eps: float) -> T:
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        ctx.dtype = x.dtype
        return (unit.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else unit) * weight

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None, None]:
        unit, inverse, weight = ctx.saved_tensors
        grad = (grad * weight).to(unit.dtype)
        along = (grad * unit).mean(-1, keepdim=True)
        return torch.addcmul(grad, unit, along, value=-1).mul_(inverse).to(ctx.dtype), None, None


class FrozenRMSNorm(RMSNorm):
    """diffusers' RMSNorm whose weight does not train: the same values, a backward of half the operations."""

    def forward(self, hidden_states: T) -> T:
        """(…, D) to (…, D)."""
        if self.weight.requires_grad or is_zero_param(self.weight):  # ZeRO-3 gathers it around diffusers' own forward
            return super().forward(hidden_states)
        return _ScaledToUnit.apply(hidden_states, self.weight, self.eps)


def use_frozen_norms(model: nn.Module) -> None:
    """Let the model's plain RMS norms be `FrozenRMSNorm`."""
    for module in model.modules():
        if type(module) is RMSNorm and module.weight is not None and module.bias is None:
            module.__class__ = FrozenRMSNorm
