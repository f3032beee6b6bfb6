"""Two ranks' collectives as nccl has them, without a GPU: tensors of the accelerator only.

A pretended accelerator for the few operations that collectives need: a tensor moved there is a wrapper that computes on
the host. It goes by the name 'meta', which torch lets anybody use without a driver. `dist.all_reduce` refuses host
tensors with nccl's words, and adds an equal rank's tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed import accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightrft_visual.runtime import collectives

DEVICE = torch.device("meta")


class Placed(torch.Tensor):
    """A tensor that says it is on the accelerator; `held` has its values."""

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        placed = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=DEVICE)
        placed.held = held
        return placed

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return pretend(operation, args, kwargs or {})


def pretend(operation, args, kwargs):
    target = kwargs.get("device")
    if operation is torch.ops.aten._to_copy.default and target is not None and torch.device(target).type == "meta":
        held = args[0].held if isinstance(args[0], Placed) else args[0].clone()
        return Placed(held)
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if len({each.device.type for each in tensors if each.dim()}) > 1:
        raise RuntimeError("Expected all tensors to be on the same device")
    on_device = any(isinstance(each, Placed) for each in tensors)
    args, kwargs = tree_map_only(Placed, lambda each: each.held, (args, kwargs))
    result = operation(*args, **kwargs)
    stays = on_device and not (target is not None and torch.device(target).type == "cpu")
    return tree_map_only(torch.Tensor, Placed, result) if stays else result


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return pretend(operation, args, kwargs or {})


@contextmanager
def two_strict_ranks(monkeypatch, backend: str = "meta:nccl") -> Iterator[list[torch.Size]]:
    """Rank 0 of two equal ranks; gives the shapes that were reduced. Host tensors are refused, as nccl refuses them."""
    reduced = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        if not isinstance(tensor, Placed):
            raise RuntimeError("No backend type associated with device type cpu")
        reduced.append(tensor.shape)
        if op == dist.ReduceOp.SUM:
            tensor.held *= 2

    def all_gather_object(gathered, value, group=None):
        gathered[:] = [value] * len(gathered)

    monkeypatch.setattr(collectives, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backend)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src=0: None)
    device = SimpleNamespace(current_device_name=lambda: str(DEVICE))
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: device)
    with _Mode():
        yield reduced
