"""Products in float64 on the host, for models whose log-probs guidance and low temperatures multiply.

A matrix product rounds differently with one row than with many, so a token that is drawn alone over a cache and the
same token scored within its sample differ in their last bits. Worked out in float64 and rounded once, both are equal.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from .logprobs import LogProbLinear

T = torch.Tensor


class ExactLinear(nn.Linear):
    """An `nn.Linear` whose forward is worked out in float64 where weight and input are float32 on the host."""

    def forward(self, hidden: T) -> T:
        """(..., out) of hidden (..., in), in its dtype."""
        if hidden.device.type != "cpu" or not hidden.dtype == self.weight.dtype == torch.float32:
            return super().forward(hidden)
        return _ExactProduct.apply(hidden, self.weight, self.bias)


class _ExactProduct(torch.autograd.Function):
    """F.linear in float64; gradients in float32, which replay does not read."""

    @staticmethod
    def forward(ctx, hidden, weight, bias):
        # The parameter itself is saved, not its data: ZeRO-3 frees and gathers that between forward and backward.
        ctx.save_for_backward(hidden, weight)
        wide = None if bias is None else bias.double()
        return F.linear(hidden.double(), weight.double(), wide).to(hidden.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (hidden, weight), (wants_hidden, wants_weight, wants_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if wants_hidden else None,
            rows.t() @ hidden.flatten(0, -2) if wants_weight else None,
            rows.sum(dim=0) if wants_bias else None,
        )


def exact_products(model: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Turn every plain linear layer of a model into an `ExactLinear`, in place, and let heads that score do alike.

    but: names of modules, anywhere in its tree, that stay as they are."""
    for name, module in model.named_modules():
        if set(but) & set(name.split(".")):
            continue
        if type(module) is nn.Linear:
            module.__class__ = ExactLinear
        elif isinstance(module, LogProbLinear):
            module.exact = True
