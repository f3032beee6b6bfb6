"""What lies in the memory of vLLM's weights and is neither a weight nor a buffer, through a sleep without weights.

vLLM 0.26 to 0.32 then empties all that was made while the model was built, and brings back buffers alone; on CUDA that
memory comes back with what was last in it. New weights do not fill it: such is Qwen3-VL's room for features of its
vision tower, zeros that are added to the tokens of a text.
"""

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...runtime.host_copies import bytes_of

T = torch.Tensor
_kept: WeakKeyDictionary[nn.Module, list[tuple[T, T]]] = WeakKeyDictionary()  # (bytes on the device, on the host)


def keep(model: nn.Module) -> None:
    """Copy it to the host, once, before a sleep. model: vLLM's, in the process that has it."""
    cumem: Any = sys.modules.get("vllm.device_allocator.cumem")
    if model in _kept or cumem is None or cumem.CuMemAllocator.instance is None:
        return
    given = cumem.CuMemAllocator.instance.pointer_to_data.values()
    memory = [range(each.handle[2], each.handle[2] + each.handle[1]) for each in given if each.tag == "weights"]
    filled = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    plain = (each.untyped_storage() for each in _tensors(model))
    found = {each.data_ptr(): each for each in plain if each.data_ptr() not in filled}
    lying = [bytes_of(each) for pointer, each in found.items() if any(pointer in part for part in memory)]
    _kept[model] = [(content, content.to("cpu", copy=True)) for content in lying]


def restore(model: nn.Module) -> None:
    """Write what was kept to where it was, once the memory is back. model: as of `keep`."""
    for content, kept in _kept.get(model, ()):
        content.copy_(kept)


def _tensors(model: nn.Module) -> Iterator[T]:
    """Tensors that it reaches by its modules, by vLLM's own objects and by containers."""
    left: list[Any] = [model]
    seen = {id(model)}
    while left:
        each = left.pop()
        if type(each) is T:  # no weights, and no stand-ins of a compiler, which have no memory
            if each.device.type != "meta" and each.layout is torch.strided:
                yield each
            continue
        held: list[Any] = []
        if isinstance(each, (dict, list, tuple)):
            held = [*(each.values() if isinstance(each, dict) else each)]
        elif isinstance(each, nn.Module) or type(each).__module__.startswith("vllm."):
            held = [*getattr(each, "__dict__", {}).values()]
        left += [other for other in held if id(other) not in seen]
        seen.update(map(id, held))
