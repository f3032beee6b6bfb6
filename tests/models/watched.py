"""What operations make inside of a `with`, and what is kept for backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Inside, `calls` are the operations' names, `made` what they give: (operation, shape, device)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.made: list[tuple[str, tuple[int, ...], str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.name()
        tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.calls.append(name)
        self.made += [(name, tuple(each.shape), each.device.type) for each in tensors]
        return result

    @property
    def attentions(self) -> int:
        """Calls of PyTorch's kernels of attention, without those of its gradient."""
        return sum("_scaled_dot_product_" in name and "backward" not in name for name in self.calls)

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that is not on the meta device."""
        return max((prod(shape) for _, shape, device in self.made if device != "meta"), default=0)


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """Inside, bytes by storage of what is kept for backward, without parameters."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages
