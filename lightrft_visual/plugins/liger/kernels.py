"""`use_liger_kernel`: Liger's Triton kernels for the small operations of a model's blocks (arXiv 2410.10989).

RMSNorm, gated MLPs (the activation times the other branch) and rotary positions are several kernels each in PyTorch,
and one here, forward and backward. A module of the model that is loaded gets another `forward`; its class, other models
and the state dict stay as they are. What a norm or an MLP computes is held against the kernel at start, on small random
inputs; what a function of rotary positions computes, at its first call. What differs stays as it is, and is named.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator

from ...errors import ConfigError, refused_as
from ...runtime.packages import missing
from ...runtime.start_up import log_stage

T = torch.Tensor
Forward = Callable[..., Any]
TOLERANCE = 1e-5  # of float32, for inputs of the size 1
ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")  # as transformers' attentions call them
ROTATED = ["q", "k", "cos", "sin"]
BRANCHES = {"gate_proj": (8, 24), "up_proj": (8, 24), "down_proj": (24, 8)}  # with the sizes of a small one


def check_kernels() -> None:
    """Raise ConfigError without the package, or without a card."""
    if find_spec("liger_kernel") is None:
        raise missing("liger_kernel")
    if get_accelerator().device_name() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "use_liger_kernel: Liger's Triton kernels run on a card, this run is on the CPU: leave it out"
        )


def use_kernels(transformer: nn.Module) -> None:
    """Let the norms, gated MLPs and attentions of a transformers model compute by Liger's kernels, and say how many.

    Before adapters are added and DeepSpeed divides the weights, or behind it: linear layers are called as modules, and
    a norm reads its own weight when it is called. Raises ConfigError for a model that has none of them, and where a
    kernel does not run.
    """
    used: Counter[str] = Counter()
    left: dict[str, str] = {}  # class -> kind
    tried: dict[Any, Forward | None] = {}
    rotations: dict[Forward, _Rotation] = {}
    for module in transformer.modules():
        if "forward" in vars(module):  # somebody else's already
            continue
        name = type(module).__name__
        for kind, key_of, forward_of in (("norms", _norm_key, _norm_forward), ("MLPs", _mlp_key, _mlp_forward)):
            if (key := key_of(module)) is None:
                continue
            if key not in tried:
                with refused_as(ConfigError, f"use_liger_kernel: {name} cannot be held against Liger's kernel"):
                    tried[key] = forward_of(module)
            if (forward := tried[key]) is None:
                left[name] = kind
            else:
                module.forward, used[kind] = MethodType(forward, module), used[kind] + 1
        if (forward := _attention_forward(module, rotations)) is not None:
            module.forward, used["rotations"] = MethodType(forward, module), used["rotations"] + 1
    if not used:
        raise ConfigError(f"use_liger_kernel: {type(transformer).__name__} has nothing that Liger's kernels compute")
    counts = ", ".join(f"{count} {kind}" for kind, count in used.items())
    others = "".join(f"; {kind} of the class {name} compute something else and stay" for name, kind in left.items())
    log_stage(f"Liger's kernels compute {counts}{others}")


# -- norms -------------------------------------------------------------------------------------------------------------


def _norm_key(module: nn.Module) -> Any:
    """(class, its settings, width) of what may be an RMSNorm: a vector of weights, an epsilon, one input; else None."""
    weight = module._parameters.get("weight")
    held = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
    if len(held) != 1 or weight is None or module._modules or _epsilon(module) is None or not _unary(type(module)):
        return None
    shape = tuple(getattr(weight, "ds_shape", weight.shape))  # the whole shape, where ZeRO-3 divides it
    return (type(module), _settings(module), *shape) if len(shape) == 1 else None


def _epsilon(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.no_grad()
def _norm_forward(module: nn.Module) -> Forward | None:
    """The forward by kernel, or None where it is no RMSNorm.

    Of the forms that there are, weight or 1 + weight, in the input's precision or in float32, it is the one whose
    results in bfloat16 are the module's.
    """
    from liger_kernel.ops import LigerRMSNormFunction

    epsilon, width, draw = _epsilon(module), _norm_key(module)[-1], torch.Generator().manual_seed(0)
    given, weight = torch.randn(3, width, generator=draw), torch.randn(width, generator=draw)

    def own(dtype: torch.dtype) -> T:
        stands_in = copy.copy(module)
        stands_in._parameters = module._parameters | {"weight": nn.Parameter(weight.to(dtype))}
        return type(module).forward(stands_in, given.to(dtype)).float()

    def distance(form: tuple[float, str]) -> float:
        made = _rms_norm(given.bfloat16(), weight.bfloat16(), epsilon, *form)
        return (made.float() - own(torch.bfloat16)).abs().sum().item()

    offset, casting = min(product((0.0, 1.0), ("llama", "gemma")), key=distance)
    made = LigerRMSNormFunction.apply(*_on_device(given, weight), epsilon, offset, casting, False)

    def forward(self: nn.Module, hidden_states: T) -> T:
        # Not in place: behind a residual sum the incoming gradient is also another module's.
        return LigerRMSNormFunction.apply(hidden_states, self.weight, epsilon, offset, casting, False)

    return forward if _same(made, own(torch.float32)) else None


def _rms_norm(hidden: T, weight: T, epsilon: float, offset: float, casting: str) -> T:
    """What Liger's kernel computes. casting: 'llama' multiplies by the weight in the input's precision, 'gemma' in
    float32."""
    normed = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + epsilon)
    if casting == "llama":
        return normed.to(hidden.dtype) * (offset + weight)
    return (normed * (offset + weight.float())).to(hidden.dtype)


# -- gated MLPs --------------------------------------------------------------------------------------------------------


def _mlp_key(module: nn.Module) -> Any:
    """(class, its settings, activation) of what may be a gated MLP, with weights in three layers alone; else None."""
    weighted = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if weighted != BRANCHES.keys() or module._parameters or not hasattr(module, "act_fn") or not _unary(type(module)):
        return None
    return type(module), _settings(module), repr(module.act_fn)


@torch.no_grad()
def _mlp_forward(module: nn.Module) -> Forward | None:
    """The forward with activation and product by kernel, or None where there is no such kernel."""
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    stands_in, draw = copy.copy(module), torch.Generator().manual_seed(0)
    branches = {name: nn.Linear(*sizes) for name, sizes in BRANCHES.items()}
    for parameter in nn.ModuleDict(branches).parameters():
        parameter.normal_(generator=draw)
    stands_in._modules = module._modules | branches
    given, (gate, up, down) = torch.randn(3, 8, generator=draw), branches.values()
    wanted = type(module).forward(stands_in, given)
    for function in (LigerSiLUMulFunction, LigerGELUMulFunction):

        def forward(self: nn.Module, hidden_states: T, function: Any = function) -> T:
            return self.down_proj(function.apply(self.gate_proj(hidden_states), self.up_proj(hidden_states)))

        if _same(down(function.apply(*_on_device(gate(given), up(given))).cpu()), wanted):
            return forward
    return None


# -- rotary positions --------------------------------------------------------------------------------------------------


def _attention_forward(module: nn.Module, rotations: dict[Forward, _Rotation]) -> Forward | None:
    """The forward of the module's class, in which the function of rotary positions is another one; None where it calls
    none by its name. rotations: those of this model, by the function that they stand for."""
    own = type(module).forward
    if not isinstance(own, FunctionType):
        return None
    plain = {name: own.__globals__[name] for name in ROTATIONS if name in own.__code__.co_names}
    if not plain or any(list(inspect.signature(each).parameters)[:4] != ROTATED for each in plain.values()):
        return None
    names = own.__globals__ | {name: rotations.setdefault(each, _Rotation(each)) for name, each in plain.items()}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__, forward.__annotations__ = own.__kwdefaults__, own.__annotations__
    return forward


class _Rotation:
    """In the place of a model's function of rotary positions: Liger's kernel, where the first call gives the same.

    The kernel takes cosines and sines whose two halves are equal, which the model's own positions decide.
    """

    def __init__(self, plain: Forward) -> None:
        self.plain = plain
        self.fits: bool | None = None  # not known before the first call

    def __call__(self, q: T, k: T, cos: T, sin: T, **kwargs: Any) -> tuple[T, T]:
        if self.fits is None and q.numel():
            self.fits = not kwargs and self._compared(q, k, cos, sin)
            if not self.fits:
                log_stage(
                    f"{self.plain.__module__}.{self.plain.__name__} is not what Liger's kernel computes and stays"
                )
        return _rotated(q, k, cos, sin) if self.fits and not kwargs else self.plain(q, k, cos, sin, **kwargs)

    @torch.no_grad()
    def _compared(self, *given: T) -> bool:
        floats = [each.float() for each in given]
        wanted = self.plain(*floats)
        made = _rotated(*(each.clone() for each in floats))  # the kernel writes into what it is given
        return all(map(_same, made, wanted))


def _rotated(q: T, k: T, cos: T, sin: T) -> tuple[T, T]:
    """By kernel: (B, heads, T, D) with cos and sin (B, T, D), or of a vision tower (T, heads, D) with (T, D)."""
    from liger_kernel.ops import LigerRopeFunction

    if q.dim() == 4:
        return LigerRopeFunction.apply(q, k, cos, sin)
    batched = (each.unsqueeze(0).transpose(1, 2) for each in (q, k))
    made = LigerRopeFunction.apply(*batched, cos.float(), sin.float())  # in float32, as towers do it
    return tuple(each.transpose(1, 2).squeeze(0) for each in made)


# -- comparisons -------------------------------------------------------------------------------------------------------


def _settings(module: nn.Module) -> Any:
    """What modules of a class may differ in, but for their weights."""
    return tuple(sorted((name, each) for name, each in vars(module).items() if isinstance(each, int | float | str)))


@cache
def _unary(kind: type[nn.Module]) -> bool:
    return len(inspect.signature(kind.forward).parameters) == 2


def _on_device(*tensors: T) -> Sequence[T]:
    """Copies, which kernels may write into, where kernels run."""
    return [each.to(get_accelerator().current_device_name(), copy=True) for each in tensors]


def _same(made: T, wanted: T) -> bool:
    return bool((made.to(wanted.device) - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=1.0))
