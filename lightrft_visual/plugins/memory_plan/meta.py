"""Memory of a computation that is not carried out: it runs on meta tensors, whose storage is only counted.

Nothing is allocated, so a model of any size is looked at in a second. What autograd keeps, what checkpointing computes
again in backward and what is freed in between is all in the number, as PyTorch itself decides it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...models.routing import count_experts

T = torch.Tensor


class LiveBytes(TorchDispatchMode):
    """Inside it, `now` is the sum of the storages that were made inside and still live, `peak` its largest value.

    known: tensors that were there before, which do not count.
    """

    def __init__(self, known: Iterable[T] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, Any] = {}
        for tensor in known:
            self._follow(tensor, counts=False)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, T):
                self._follow(leaf)
        return result

    def _follow(self, tensor: T, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes() if counts else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        self.seen[key] = weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        del self.seen[key]


def _attended(query: T, key: T, value: T) -> tuple[T, T]:
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


# An operation, as the kernels are, that checkpointing may keep the result of.
OWN = torch.library.Library("lightrft_visual", "FRAGMENT")
OWN.define("attention_of_shapes(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")
OWN.impl("attention_of_shapes", _attended, "Meta")


class _Attention(torch.autograd.Function):
    """Keeps what the fused kernels keep: inputs, output and a number for each query. No scores."""

    @staticmethod
    def forward(ctx, query, key, value):
        output, norms = torch.ops.lightrft_visual.attention_of_shapes(query, key, value)
        ctx.save_for_backward(query, key, value, output, norms)
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside it, a counting stand-in takes the place of PyTorch's attention, which would write scores on meta tensors.

    By the name in PyTorch's module and not by a mode: backward, where checkpointing computes again, runs outside modes.
    """
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda query, key, value, *_, **__: _Attention.apply(query, key, value)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def through_active_experts(model: PreTrainedModel) -> None:
    """Let the experts of a model on meta tensors hold what they do: each token goes through k of them, whichever.

    Kernels that group tokens by expert do not run on meta tensors of every type. A dense model is left as it is.
    """
    if count_experts(model.config) and model._can_set_experts_implementation():
        ALL_EXPERTS_FUNCTIONS["active"] = _active_experts
        model.set_experts_implementation("active")


def _active_experts(self: Any, hidden: T, chosen: T, weights: T) -> T:
    """hidden (tokens, H), chosen and weights (tokens, k)."""
    first, last = ((getattr(self, name)[0]) for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"))
    first, last = (first, last) if self.is_transposed else (first.t(), last.t())
    inner = hidden.repeat_interleave(chosen.shape[1], dim=0) @ first
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    found = (inner @ last) * weights.reshape(-1, 1)
    return found.view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A module built without memory for its weights."""
    with torch.device("meta"):
        return build()


class Held(NamedTuple):
    """Bytes beside weights and buffers: at the end of a forward, and the most in it and in the backward after it."""

    kept: int
    peak: int


def held_bytes(module: nn.Module, run: Callable[[], T], *, backward: bool) -> Held:
    """What `run`, a forward of the module, holds, and with `backward` the backward after it.

    Gradients of weights leave as soon as they are whole: where they stay is the train engine's matter.
    """
    hooks = []
    if backward:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
    live = LiveBytes([*module.parameters(), *module.buffers()])
    try:
        with torch.set_grad_enabled(backward), fused_attention(), live:
            result = run()
            kept = live.now
            if backward:
                result.sum().backward()
            del result
    finally:
        for hook in hooks:
            hook.remove()
        module.zero_grad(set_to_none=True)
    return Held(kept, live.peak)


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def weights_bytes(module: nn.Module | None) -> int:
    """Of weights and buffers, each in its own precision."""
    if module is None:
        return 0
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}
    return sum(each.numel() * each.element_size() for each in tensors.values())
