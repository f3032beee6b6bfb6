"""How often attention is computed."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class AttentionCalls(TorchDispatchMode):
    """Inside, `count` is the calls of PyTorch's kernels of attention, without those of its gradient."""

    count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_scaled_dot_product_" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))
