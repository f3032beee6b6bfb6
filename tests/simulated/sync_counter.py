"""Counts reads of the simulated device, and collectives, by the line of ours that asks: between two optimizer steps,
while a step's samples are scored, and while images are drawn.

Not counted: what DeepSpeed asks for, which reduces gradients and looks for overflow, and what the libraries of models
read of their inputs.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .device import NAME

OURS = "lightrft_visual."
THEIRS = ("deepspeed", "transformers", "diffusers", "peft")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "reduce_scatter_tensor",
)  # fmt: skip
BY_BLOCKS = f"{OURS}models.attention"  # only where PyTorch's varlen, which takes borders on the device, is missing
ON_BEHALF = (f"{OURS}runtime.collectives", f"{OURS}runtime.host_copies")  # of whoever calls them
OF_VALUES = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::unique_dim")


def asker() -> str | None:
    """'package.module:line' of the innermost frame of ours; None where another library's is nearer."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] in THEIRS or name == BY_BLOCKS:
            return None
        if name.startswith(OURS) and name not in ON_BEHALF:
            return f"{name.removeprefix(OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def waits(operation, args, kwargs, result) -> bool:
    """Whether the host waits for the device: a value leaves it, a shape follows from values, or what is copied to it
    comes from pageable memory by a copy that blocks, which CUDA ends by synchronising the stream."""
    given = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    on_device = [each for each in given if each.device.type == NAME]
    name = operation._schema.name
    if name == "aten::_to_copy" and not on_device:
        return result.device.type == NAME and not kwargs.get("non_blocking")
    if not on_device:
        return False
    if name in OF_VALUES:
        return True
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1])
    if name in ("aten::copy_", "aten::_copy_from"):
        apart = name == "aten::copy_" and len(args) > 2 and args[2]  # non_blocking: whoever reads waits by itself
        return len({each.device.type for each in given}) > 1 and not apart
    return name == "aten::_to_copy" and result.device.type == "cpu"


@dataclass
class Counts:
    """Of one span: between two optimizer steps, or a stage's call."""

    reads: Counter = field(default_factory=Counter)
    collectives: Counter = field(default_factory=Counter)
    micro_batches: int = 0

    def plain(self) -> dict:
        """For json; what others ask for is left out."""
        named = {key: dict(getattr(self, key)) for key in ("reads", "collectives")}
        named = {key: {line: n for line, n in found.items() if line} for key, found in named.items()}
        return named | {"micro_batches": self.micro_batches}


class SyncCounter(TorchDispatchMode):
    """A run's `Counts`. spans: "train", one for each optimizer step, begun by the step before or the loss; "score", one
    for the forward passes of a step's experience; "sample", one for each call of an engine of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: dict[str, list[Counts]] = {"train": [], "score": [], "sample": []}
        self.current: Counts | None = None
        accelerator = get_accelerator()
        accelerator.synchronize = self._waiting(accelerator.synchronize)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if self.current is not None and waits(operation, args, kwargs or {}, result):
            self.current.reads[asker()] += 1
        return result

    def _waiting(self, synchronize: Callable) -> Callable:
        def call(*args, **kwargs):
            if self.current is not None:
                self.current.reads[asker()] += 1
            return synchronize(*args, **kwargs)

        return call

    def _begin(self) -> None:
        if self.current is None:
            self.current = Counts()
            self.__enter__()

    def _micro_batch(self) -> None:
        self.current.micro_batches += 1

    def _cut(self, name: str = "train") -> None:
        self.spans[name].append(self.current)
        self.current = Counts()

    def _end(self, name: str | None = None) -> None:
        if self.current is not None:
            if name is not None:
                self.spans[name].append(self.current)
            self.current = None
            self.__exit__(None, None, None)

    def _counted(self, collective: Callable) -> Callable:
        def call(*args, **kwargs):
            if self.current is not None:
                self.current.collectives[asker()] += 1
            return collective(*args, **kwargs)

        return call

    def run(self, trainer) -> None:
        """The trainer's whole run, counted."""
        for name in ("policy_update", "value_update", "replay_update"):
            if getattr(trainer, name, None) is not None:
                around(getattr(trainer, name), "step", before=self._begin)
        if hasattr(trainer, "reward_update"):  # whose samples go through no buffer
            around(trainer.reward_update, "step", before=self._begin, after=self._end)
        for engine in trainer.engines().values():
            around(engine, "accumulate", before=self._micro_batch)
            around(engine.engine, "step", after=self._cut)
        around(trainer.buffer, "clear", before=self._end)
        if hasattr(trainer.maker, "forward_stage"):
            around(trainer.maker.forward_stage, "run", before=self._begin, after=lambda: self._end("score"))
        else:
            around(trainer.maker.engine, "generate", before=self._begin, after=lambda: self._end("sample"))
        plain = {name: getattr(dist, name) for name in COLLECTIVES}
        try:
            for name, collective in plain.items():
                setattr(dist, name, self._counted(collective))
            trainer.fit()
        finally:
            for name, collective in plain.items():
                setattr(dist, name, collective)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({name: [each.plain() for each in found] for name, found in self.spans.items()}))


def around(owner, name: str, before=lambda: None, after=lambda: None) -> None:
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        before()
        result = plain(*args, **kwargs)
        after()
        return result

    setattr(owner, name, call)
