"""Gradient checkpointing of a model's blocks, whole or but for attention.

A checkpointed block keeps what goes into it and runs once more in backward (arXiv 1604.06174). Attention is the part of
it whose cost grows with the square of the length, while its result is as large as what goes in. With `attention` that
result is kept too, and backward runs all of the block again but attention (as torchtitan's selective checkpointing).

PyTorch's `create_selective_checkpoint_contexts` counts all operations, and refuses one in the second run that the first
has not had. Under ZeRO-3 there are some: a block's weights may be gathered ahead of its first run and within its
second. Here calls of attention alone are counted.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..config.shared import ATTENTION, RECOMPUTES
from ..errors import ConfigError

T = torch.Tensor


def checkpoint_blocks(transformer: PreTrainedModel, how: str) -> None:
    """Checkpoint the blocks of a transformers model as the setting says; 'none', and 'auto' before a plan, leave it.

    Raises ConfigError for a model without checkpointing, or without the one that keeps attention.
    """
    if how not in RECOMPUTES:
        return
    name, arguments = type(transformer).__name__, {"use_reentrant": False}
    if not transformer.supports_gradient_checkpointing:
        raise ConfigError(f"gradient_checkpointing: {name} has none; use none")
    if how == ATTENTION:
        if "value" in inspect.signature(transformer._set_gradient_checkpointing).parameters:
            raise ConfigError(f"gradient_checkpointing attention: {name}'s own code checkpoints whole blocks; use full")
        arguments["context_fn"] = KeptAttention(name)
    transformer.gradient_checkpointing_enable(arguments)


def checkpointing_func(how: str, name: str) -> Callable[..., Any]:
    """The same for diffusers' models: what runs (block, *its inputs). name: of the model, for messages."""
    arguments = {"context_fn": KeptAttention(name)} if how == ATTENTION else {}

    def run(block: Any, *inputs: Any) -> Any:
        return checkpoint(block.__call__, *inputs, use_reentrant=False, **arguments)

    return run


class KeptAttention:
    """The `context_fn` of one model's checkpoints: (mode of the first run, mode of the second) for each block.

    name: of the model. The second run raises ConfigError where no block has called attention as one operation.
    """

    def __init__(self, name: str) -> None:
        self.name, self.found = name, False

    def __call__(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        results: list[Any] = []
        return _Run(self, results, False), _Run(self, results, True)


class _Run(TorchDispatchMode):
    """Inside, results of attention are kept, or in the second run of a block given again in their order."""

    def __init__(self, model: KeptAttention, results: list[Any], again: bool) -> None:
        super().__init__()
        self.model, self.results, self.again = model, results, again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Blocks may be compiled: their programs call attention as an operation too."""
        return True

    def __enter__(self) -> Any:
        if self.again and not self.model.found:
            why = "no block has attention as one operation whose result can be kept"
            raise ConfigError(f"gradient_checkpointing attention of {self.model.name}: {why}; use full")
        self.left = iter(self.results)  # a second backward begins anew
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        kept = keeps(func) and not dropped_out(func, args, kwargs)
        if kept and self.again:
            return next(self.left)
        result = func(*args, **(kwargs or {}))
        if kept:
            self.model.found = True
            self.results.append(tree_map_only(T, T.detach, result))  # without the graph, which refers to the block
        return result


@cache
def keeps(operation: Any) -> bool:
    """Whether an operation is attention: PyTorch's kernels, those of FlashAttention and of other packages."""
    name = operation.name().rpartition("::")[2]
    forward = "backward" not in name and "bwd" not in name and not operation._schema.is_mutable
    return forward and ("attention" in name or "attn" in name)


def dropped_out(operation: Any, args: Sequence, kwargs: Mapping | None) -> bool:
    """Whether a call draws random numbers: left out of the second run, what is drawn after it would be another.

    Args:
        operation: one that `keeps` names as attention.
        args, kwargs: of the call; kwargs None: none.
    """
    named = dict(zip((each.name for each in operation._schema.arguments), args)) | dict(kwargs or {})
    return bool(named.get("dropout_p"))
