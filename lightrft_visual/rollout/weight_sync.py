"""The trainer's weights under checkpoint names, one at a time, whole: from ZeRO shards and with LoRA merged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from ..strategy.deepspeed import TrainEngine

T = torch.Tensor


def named_weights(engine: TrainEngine, dtype: torch.dtype | None = None) -> Iterator[tuple[str, T]]:
    """(checkpoint name, tensor) of every weight of the policy, in module order; tied weights come once.

    Under ZeRO-3 each weight is gathered while the consumer holds it: all ranks must consume in step. Tensors are valid
    until the next one is asked for. LoRA layers come as base + scale * B A, leaving the layers themselves as they are.
    """
    model = engine.module.model
    if isinstance(model, PeftModel):
        yield from _merged(engine, model, dtype)
        return
    for name, parameter in model.named_parameters():
        with engine.gathered([parameter]):
            yield name, _cast(parameter.data, dtype)


def _merged(engine: TrainEngine, model: PeftModel, dtype: torch.dtype | None) -> Iterator[tuple[str, T]]:
    base = model.get_base_model()
    adapters = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        layer = adapters.get(owner) if owner != name else None
        together = [parameter, *(layer.parameters() if layer is not None else [])]
        with engine.gathered(together):
            tensor = parameter.data
            if layer is not None:
                for adapter in layer.active_adapters:
                    tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
            yield name.replace(".base_layer.", "."), _cast(tensor, dtype)


def _cast(tensor: T, dtype: torch.dtype | None) -> T:
    return tensor.detach() if dtype is None else tensor.detach().to(dtype)


def gathered_state_dict(engine: TrainEngine, keep: bool, dtype: torch.dtype | None = None) -> dict[str, T]:
    """All weights under checkpoint names on the host; filled where `keep` (rank 0), empty elsewhere. A collective."""
    state: dict[str, T] = {}
    for name, tensor in named_weights(engine, dtype):
        if keep:
            state[name] = tensor.to("cpu", copy=True)
    return state
