"""Copies of the trained weights: EMA for evaluation, the old policy of DiffusionNFT, the reference of full training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

T = torch.Tensor


def gathered(parameters: list[nn.Parameter], modify: bool = False) -> Any:
    """A context in which the parameters are whole on every rank; outside ZeRO-3 they always are."""
    if not any(is_zero_param(parameter) for parameter in parameters):
        return nullcontext()
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if modify else None)


class WeightCopy:
    """A copy of parameters with its own memory, moved towards them by `update` and lent to the model by `swapped`.

    The copy is made by clone: on a CPU run `.detach().cpu()` would alias the weights and follow every step. dtype: of
    the copy, None for that of the weights; one that is averaged takes fp32, as bf16 rounds small moves away. Every rank
    holds whole tensors, also under ZeRO-3: as much memory as the trained weights, little with LoRA.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters = list(parameters)
        with gathered(self.parameters):
            self.copies = [parameter.detach().to(dtype or parameter.dtype, copy=True) for parameter in self.parameters]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """copy = decay * copy + (1 - decay) * weight; decay 0 copies the weights."""
        with gathered(self.parameters):
            for copy, parameter in zip(self.copies, self.parameters):
                copy.lerp_(parameter.detach().to(copy.device, copy.dtype), 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the copy inside this context and gets its weights back, bit for bit, afterwards.

        Run no optimizer step inside. Graphs recorded before may be differentiated after it, not inside.
        """
        weights = self._lend(self.copies)
        try:
            yield
        finally:
            self._lend(weights)

    @torch.no_grad()
    def _lend(self, values: list[T]) -> list[T]:
        """Write values into the parameters; returns copies of what stood there."""
        with gathered(self.parameters, modify=True):
            kept = [parameter.detach().clone() for parameter in self.parameters]
            for parameter, value in zip(self.parameters, values):
                parameter.data.copy_(value)
        return kept

    def state_dict(self) -> dict[str, T]:
        return {str(index): copy for index, copy in enumerate(self.copies)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, T]) -> None:
        """Raises ValueError where count or shapes differ from the parameters of this run."""
        if len(state) != len(self.copies):
            raise ValueError(f"the saved copy has {len(state)} tensors, the model trains {len(self.copies)}")
        for index, copy in enumerate(self.copies):
            saved = state[str(index)]
            if saved.shape != copy.shape:
                raise ValueError(f"tensor {index} of the saved copy is {tuple(saved.shape)}, not {tuple(copy.shape)}")
            copy.copy_(saved)

    def resume(self, state: dict[str, T] | None) -> None:
        """The saved copy, or one of the resumed weights where the run that is resumed kept none."""
        if state is None:
            self.update(0.0)
        else:
            self.load_state_dict(state)


class WeightAverage(WeightCopy):
    """EMA of the weights, updated every `interval` optimizer steps (Flow-GRPO: decay 0.9 every 8)."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float, interval: int = 1) -> None:
        super().__init__(parameters, torch.float32)
        self.decay, self.interval, self.steps = decay, interval, 0

    def step(self) -> None:
        """Call after each optimizer step."""
        self.steps += 1
        if self.steps % self.interval == 0:
            self.update(self.decay)

    def state_dict(self) -> dict[str, T]:
        return super().state_dict() | {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, T]) -> None:
        state = dict(state)
        self.steps = int(state.pop("steps"))
        super().load_state_dict(state)
