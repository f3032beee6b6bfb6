"""What the frozen text encoders made of prompts, remembered: a run meets the same prompts again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

T = torch.Tensor
Conditions = dict[str, T]


class PromptCache:
    """Conditions by key, in host memory; the ones unused for longest go when all take more than `limit` bytes."""

    def __init__(self, limit: int = 2**30) -> None:
        self.limit, self.size = limit, 0
        self._kept: OrderedDict[Hashable, Conditions] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, encode: Callable[[], Conditions]) -> Conditions:
        """The conditions under `key`, encoded at the first call."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        conditions = {name: value.detach().cpu() for name, value in encode().items()}
        self._kept[key] = conditions
        self.size += _bytes(conditions)
        while self.size > self.limit and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.size -= _bytes(oldest)
        return conditions


def _bytes(conditions: Conditions) -> int:
    return sum(value.numel() * value.element_size() for value in conditions.values())
