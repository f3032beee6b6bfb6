"""Models that take turns on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def on_device(module: nn.Module, device: torch.device | str, offload: bool) -> Iterator[nn.Module]:
    """The module in evaluation mode on `device`, without gradients; with `offload` it is back on the CPU afterwards."""
    module.to(device).eval()
    try:
        with torch.no_grad():
            yield module
    finally:
        if offload and torch.device(device).type != "cpu":
            module.to("cpu")
