"""Memory and work of a computation that is not carried out: it runs on meta tensors, whose storage is only counted.

Nothing is allocated, so a model of any size is looked at in a second. What autograd keeps, what checkpointing computes
again in backward, which gradients adapters leave out and what is freed in between is all in the numbers, as PyTorch
itself decides it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...models.routing import count_experts
from ...runtime.files import cache_root

logger = logging.getLogger(__name__)

T = torch.Tensor
COUNTED_BY = ("torch", "transformers", "peft", "diffusers")  # packages whose code runs on the meta tensors
PACKAGE = Path(__file__).parents[2]
NOT_MOVED = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # no kernel


@dataclass(frozen=True)
class Work:
    """What a computation does. flops: of products and attention; again: those of them that checkpointing computes a
    second time; moved: bytes that other operations read and write; calls: operations of PyTorch, views among them."""

    flops: float = 0.0
    again: float = 0.0
    moved: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = zip(astuple(self), astuple(other))
        return Work(*(own + more for own, more in pairs))

    def times(self, count: float, calls: float | None = None) -> Work:
        """So often; its calls as often as `calls` says, where a last micro-batch is smaller than the others."""
        return Work(*(count * each for each in (self.flops, self.again, self.moved)), self.calls * (calls or count))


class LiveBytes(TorchDispatchMode):
    """Inside it, `now` is the sum of the storages that were made inside and still live, `peak` its largest value, and
    `work` what was computed.

    known: tensors that were there before, which do not count.
    """

    def __init__(self, known: Iterable[T] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.flops = self.again = self.moved = self.calls = 0.0
        self.seen: dict[int, Any] = {}
        for tensor in known:
            self._follow(tensor, counts=False)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        made = list(_tensors((result,)))
        for each in made:
            self._follow(each)
        self.calls += 1
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.products(formula(*args, **kwargs, out_val=result))
        elif not function.is_view and function._overloadpacket.__name__ not in NOT_MOVED:
            self.moved += sum(each.numel() * each.element_size() for each in (*_tensors(args), *made))
        return result

    def products(self, flops: float) -> None:
        """Count floating point operations of a product. In a backward pass only what is computed again has gradients
        switched on."""
        self.flops += flops
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self.again += flops

    @property
    def work(self) -> Work:
        """So far."""
        return Work(self.flops, self.again, self.moved, self.calls)

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


def _tensors(values: Iterable[Any]) -> Iterator[T]:
    """Those among the values, and in lists of them."""
    for value in values:
        if isinstance(value, T):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _attended(query: T, key: T, value: T, flops: float) -> tuple[T, T]:
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


# An operation, as the kernels are, that checkpointing may keep the result of. flops: of its two products.
OWN = torch.library.Library("lightrft_visual", "FRAGMENT")
OWN.define("attention_of_shapes(Tensor query, Tensor key, Tensor value, float flops) -> (Tensor, Tensor)")
OWN.impl("attention_of_shapes", _attended, "Meta")
register_flop_formula(torch.ops.lightrft_visual.attention_of_shapes)(lambda *shapes, **_: shapes[-1])


class _Attention(torch.autograd.Function):
    """Keeps what the fused kernels keep: inputs, output and a number for each query. No scores.

    flops: of forward's two products; backward has five, as scores are computed again.
    """

    @staticmethod
    def forward(ctx, query, key, value, live, flops):
        output, norms = torch.ops.lightrft_visual.attention_of_shapes(query, key, value, flops)
        ctx.save_for_backward(query, key, value, output, norms)
        ctx.live, ctx.flops = live, flops
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        ctx.live.products(2.5 * ctx.flops)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


@contextmanager
def fused_attention(live: LiveBytes) -> Iterator[None]:
    """Inside it, a counting stand-in takes the place of PyTorch's attention, which would write scores on meta tensors.

    By the name in PyTorch's module and not by a mode: backward, where checkpointing computes again, runs outside modes.
    """

    def attention(query: T, key: T, value: T, *_: Any, is_causal: bool = False, **__: Any) -> T:
        pairs = query.shape[:-1].numel() * key.shape[-2] * (0.5 if is_causal else 1.0)  # causal kernels skip half
        flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
        return _Attention.apply(query, key, value, live, flops)

    with patch.object(F, "scaled_dot_product_attention", attention):
        yield


def through_active_experts(model: PreTrainedModel) -> None:
    """Let the experts of a model on meta tensors hold what they do: each token goes through k of them, whichever.

    Kernels that group tokens by expert do not run on meta tensors of every type. A dense model is left as it is.
    """
    decoder = model.get_decoder()  # a class around it need not know of experts
    if count_experts(model.config) and decoder._can_set_experts_implementation():
        ALL_EXPERTS_FUNCTIONS["active"] = _active_experts
        decoder.set_experts_implementation("active")


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


def adapters_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its adapters in the precision of the run: peft makes them in fp32, and DeepSpeed casts them."""
    for name, weight in module.named_parameters():
        if ".lora_" in name:
            weight.data = weight.data.to(dtype)
    return module


class Held(NamedTuple):
    """Bytes beside weights and buffers: at the end of a forward, and the most in it and in the backward after it. The
    others are those of `Work`."""

    kept: int
    peak: int
    flops: float = 0.0
    again: float = 0.0
    moved: float = 0.0
    calls: float = 0.0

    @property
    def work(self) -> Work:
        """Of the same passes."""
        return Work(*self[2:])


def held_bytes(module: nn.Module, run: Callable[[], T], *, backward: bool) -> Held:
    """What a forward of a module holds and does.

    Gradients of weights leave as soon as they are whole: where they stay is the train engine's matter.

    Args:
        module: on meta tensors. Its own weights and buffers do not count.
        run: the forward. Backward begins at the sum of what it returns.
        backward: whether the backward after it is part of it; else it runs without gradient.
    """
    hooks = []
    if backward:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
    live = LiveBytes([*module.parameters(), *module.buffers()])
    try:
        with torch.set_grad_enabled(backward), fused_attention(live), live:
            result = run()
            kept = live.now
            if backward:
                result.sum().backward()
            del result
    finally:
        for hook in hooks:
            hook.remove()
        module.zero_grad(set_to_none=True)
    return Held(kept, live.peak, *astuple(live.work))


def remembered(shape: str, count: Callable[[], Held]) -> Held:
    """count(), or what it returned before. shape: all that the answer depends on but for the code, as text.

    Other versions of the packages or of this one's own files count anew. A cache that cannot be written is done
    without.
    """
    name = hashlib.sha256(f"{_code()} {shape}".encode()).hexdigest()
    path = cache_root() / "plans" / f"{name[:32]}.json"
    try:
        return Held(*json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or not whole
        held = count()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(held))
        part.replace(path)
    except OSError as error:
        logger.debug("the plan's figures are not kept: %s", error)
    return held


@cache
def _code() -> str:
    """A digest of what counts: versions of packages, and the files of the rooms that take part."""
    found = hashlib.sha256(" ".join(f"{name} {version(name)}" for name in COUNTED_BY).encode())
    for room in ("plugins/memory_plan", "models"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def weights_bytes(module: nn.Module) -> int:
    """Of weights and buffers, each in its own precision."""
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}
    return sum(each.numel() * each.element_size() for each in tensors.values())
