"""What lies in the memory of vLLM's weights and is neither a weight nor a buffer, through a sleep without weights.

vLLM 0.26 to 0.32 then empties all that was made while the model was loaded, and brings back buffers alone. What such
memory holds when it is back CUDA does not say, and new weights do not fill it: positions of tokens that pad a CUDA
graph, strides of experts in 8 bits, Qwen3-VL's room for features of its vision tower, zeros that a text's tokens get.
"""

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...runtime.host_copies import bytes_of

T = torch.Tensor
_kept: WeakKeyDictionary[Any, list[tuple[T, T | None]]] = WeakKeyDictionary()  # runner -> (bytes, copies; None: zeros)


def keep(worker: Any) -> None:
    """Copy it to the host, once, before a sleep. worker: vLLM's, in its process."""
    runner, cumem = worker.model_runner, sys.modules.get("vllm.device_allocator.cumem")
    allocator: Any = getattr(cumem, "CuMemAllocator", None)
    if runner in _kept or allocator is None or allocator.instance is None:
        return
    given = (each for each in allocator.instance.pointer_to_data.values() if each.tag == "weights")
    memory = [range(each.handle[2], each.handle[2] + each.handle[1]) for each in given]
    model = runner.get_model()
    given_again = (each.data for each in (*model.parameters(), *model.buffers()))
    filled = {each.untyped_storage().data_ptr() for each in given_again if type(each) is T}
    plain = (each.untyped_storage() for each in _tensors(runner))
    found = {each.data_ptr(): each for each in plain if each.data_ptr() not in filled}
    lying = [bytes_of(each) for pointer, each in found.items() if any(pointer in part for part in memory)]
    _kept[runner] = [(each, each.to("cpu", copy=True) if each.any() else None) for each in lying]


def restore(worker: Any) -> None:
    """Write what was kept to where it was, once the memory is back. worker: as of `keep`."""
    for content, kept in _kept.get(worker.model_runner, ()):
        content.zero_() if kept is None else content.copy_(kept)


def _tensors(runner: Any) -> Iterator[T]:
    """Tensors that it reaches by modules, by vLLM's own objects and by containers."""
    left: list[Any] = [runner]
    seen = {id(runner)}
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
