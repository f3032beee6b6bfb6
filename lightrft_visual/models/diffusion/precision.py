"""Weights that diffusers keeps in fp32 stay in fp32 when DeepSpeed trains the others in bf16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

from ...strategy import collectives

T = torch.Tensor


def kept_in_fp32(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The frozen fp32 weights of the parts that a model of diffusers names in `_keep_in_fp32_modules` (Wan: norms, time
    embedding, modulation tables). Weights that train follow the training precision; the optimizer has them in fp32.
    """
    return [
        parameter
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32
        and not parameter.requires_grad
        and not is_zero_param(parameter)  # it was loaded in its precision, which DeepSpeed then leaves alone
        and any(part in name for part in model._keep_in_fp32_modules or ())
    ]


@contextmanager
def fp32_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """DeepSpeed's engine is made inside: it casts every parameter, and these get their own values back afterwards."""
    parameters = kept_in_fp32(models)
    values = [parameter.detach().clone() for parameter in parameters]
    yield
    for parameter, value in zip(parameters, values):
        _restore(parameter, value)


def _restore(parameter: nn.Parameter, value: T) -> None:
    whole = parameter.shape == value.shape
    if is_zero_param(parameter):
        part = parameter.ds_tensor
        padded = part.new_zeros(part.numel() * collectives.world_size(), dtype=value.dtype)
        padded[: value.numel()] = value.flatten()
        part.data = padded.chunk(collectives.world_size())[collectives.rank()].clone()
    # A weight that is given away has no numbers, and still says its type: diffusers asks for it before a forward.
    parameter.data = value.to(parameter.device) if whole else parameter.data.to(value.dtype)
