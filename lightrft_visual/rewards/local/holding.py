"""Where a local reward model is while it scores: a whole copy on each rank, or divided over all ranks (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...runtime import collectives
from ...runtime.deepspeed import DeepspeedStrategy
from ...runtime.offload import OptimizerOffload, on_device

Forward = Callable[[nn.Module, Sequence[int] | None], None]  # of the samples at these places; None: of anything


class WholeModel:
    """A copy on each rank. offload: it is on the accelerator only while it scores."""

    all_ranks = False

    def __init__(self, module: nn.Module, offload: bool) -> None:
        self.module, self.offload = module, offload

    def run(self, groups: Iterable[Sequence[int]], forward: Forward, device: torch.device | str) -> None:
        """One forward for each group of samples."""
        with on_device(self.module, device, self.offload) as model:
            for group in groups:
                forward(model, group)


class DividedModel:
    """Each rank holds a part, and its weights come together module by module in every forward.

    So all ranks run the same number of forwards: those with fewer samples than others add some whose scores nobody
    reads. offload: this rank's part waits on the host between uses.
    """

    all_ranks = True

    def __init__(self, module: nn.Module, offload: bool, strategy: DeepspeedStrategy) -> None:
        self.engine = strategy.prepare_divided(module)
        self._offload = OptimizerOffload() if offload and strategy.device.type != "cpu" else None
        self._leave()

    def run(self, groups: Iterable[Sequence[int]], forward: Forward, device: torch.device | str) -> None:
        """As `WholeModel.run`; a collective, also for a rank without samples. It runs on the strategy's device."""
        groups = list(groups)
        turns = int(collectives.all_reduce_max(torch.tensor([float(len(groups))])).item())
        if self._offload is not None:
            self._offload.come_back()
        with torch.no_grad():
            for turn in range(turns):
                forward(self.engine, groups[turn] if turn < len(groups) else None)
        self._leave()

    def _leave(self) -> None:
        if self._offload is not None:
            self._offload.leave(self._parts())

    def _parts(self) -> Iterator[torch.Tensor]:
        for parameter in self.engine.module.parameters():
            yield from (part for part in (parameter.ds_tensor, parameter.ds_secondary_tensor) if part is not None)


def dividing(strategy: Any) -> DeepspeedStrategy | None:
    """The strategy, where it divides models over the ranks; None where each rank holds whole ones."""
    return strategy if isinstance(strategy, DeepspeedStrategy) and strategy.divide is not None else None


def loading(strategy: Any) -> AbstractContextManager[None]:
    """Around the loading of a reward model: divided from the first byte where the run divides models."""
    divided = dividing(strategy)
    return nullcontext() if divided is None else divided.loading()


def held(module: nn.Module, offload: bool, strategy: Any) -> WholeModel | DividedModel:
    """A model that was loaded inside `loading`."""
    divided = dividing(strategy)
    return WholeModel(module, offload) if divided is None else DividedModel(module, offload, divided)
