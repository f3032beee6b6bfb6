"""The trainer's weights under checkpoint names, whole: from ZeRO shards in buckets, and with LoRA merged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checkpoint.adapted import is_adapted
from ..strategy.deepspeed import TrainEngine

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

T = torch.Tensor

# Of weights that ZeRO-3 gathers at once. Each gathering ends with a wait for the device, so many small ones are slow.
BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True)
class _Weight:
    """One tensor of the checkpoint. parameters: what must be whole when `value` makes it."""

    name: str
    parameters: list[nn.Parameter]
    value: Callable[[], T]

    @property
    def bytes(self) -> int:
        """Of its parameters when they are whole."""
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.parameters)


def named_weights(
    engine: TrainEngine, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, T]]:
    """(checkpoint name, tensor) of every weight of the policy, in module order; tied weights come once.

    Tensors are the trainer's own, where nothing has to be gathered, merged or cast: read them at once. Under ZeRO-3
    weights are gathered up to bucket_bytes at a time (one larger weight alone), so all ranks must consume in step; a
    gathered tensor stays as long as it is referred to. LoRA layers come as base + scale * B A, leaving the layers
    themselves as they are.
    """
    model = engine.module.model
    weights = _merged(model) if is_adapted(model) else _plain(model)
    for bucket in _buckets(weights, bucket_bytes):
        with engine.gathered([parameter for weight in bucket for parameter in weight.parameters]):
            for weight in bucket:
                yield weight.name, _cast(weight.value(), dtype)


def adapter_weights(engine: TrainEngine) -> Iterator[tuple[str, T]]:
    """(name in the trainer's model, tensor) of LoRA's adapters alone, whole. Each rank must read all of them."""
    named = [(name, parameter) for name, parameter in engine.module.model.named_parameters() if ".lora_" in name]
    with engine.gathered([parameter for _, parameter in named]):
        for name, parameter in named:
            yield name, parameter.detach()


def _buckets(weights: Iterable[_Weight], most: int) -> Iterator[list[_Weight]]:
    """Neighbours of together at most `most` bytes, or one weight that is larger."""
    bucket, size = [], 0
    for weight in weights:
        if bucket and size + weight.bytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.bytes
    if bucket:
        yield bucket


def _plain(model: nn.Module) -> Iterator[_Weight]:
    for name, parameter in model.named_parameters():
        yield _Weight(name, [parameter], partial(getattr, parameter, "data"))


def _merged(model: PeftModel) -> Iterator[_Weight]:
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    adapters = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        layer = adapters.get(owner) if owner != name else None
        own = layer.named_parameters() if layer is not None else ()
        together = [parameter, *(part for key, part in own if not key.startswith("base_layer."))]
        yield _Weight(name.replace(".base_layer.", "."), together, partial(_sum, parameter, layer))


def _sum(parameter: nn.Parameter, layer: LoraLayer | None) -> T:
    """A weight with its adapters, as a new tensor where it has any."""
    tensor = parameter.data
    if layer is not None:
        for adapter in layer.active_adapters:
            tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
    return tensor


def _cast(tensor: T, dtype: torch.dtype | None) -> T:
    return tensor.detach() if dtype is None else tensor.detach().to(dtype)


def gathered_state_dict(engine: TrainEngine, keep: bool, dtype: torch.dtype | None = None) -> dict[str, T]:
    """All weights under checkpoint names on the host, and what a checkpoint holds beside them (running means of
    batch norms); filled where `keep` (rank 0), empty elsewhere. A collective."""
    state: dict[str, T] = {}
    for name, tensor in itertools.chain(named_weights(engine, dtype), _kept_buffers(engine.module.model)):
        if keep:
            state[name] = tensor.to("cpu", copy=True)
    return state


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, T]]:
    """(checkpoint name, tensor) of the buffers that a checkpoint holds; no rank has them divided."""
    base = model.get_base_model() if is_adapted(model) else model
    held = base.state_dict().keys()
    return ((name.replace(".base_layer.", "."), buffer) for name, buffer in base.named_buffers() if name in held)
