"""Copies between host and device that make the host wait for the device as seldom as possible."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.weak import WeakTensorKeyDictionary

T = torch.Tensor
_kept = WeakTensorKeyDictionary()  # tensors on a device, and what they were copied from


def to_device(tensor: T, device: torch.device | str) -> T:
    """The tensor on `device`; the host's is remembered as long as that one lives. For what is read and never changed:
    ids, masks, sizes, pixels."""
    moved = tensor.to(device)
    if moved is not tensor and tensor.device.type == "cpu":
        _kept[moved] = tensor
    return moved


def known_on_host(tensor: T) -> T | None:
    """The tensor on the host without waiting for the device; None where there is none."""
    return tensor if tensor.device.type == "cpu" else _kept.get(tensor)


def on_host(tensor: T) -> T:
    """The tensor on the host: what `to_device` has copied, else a copy that waits for the device."""
    known = known_on_host(tensor)
    return tensor.detach().cpu() if known is None else known


class HostCopies:
    """Copies to the host of which none waits for the device; they hold numbers once `wait` has."""

    def __init__(self) -> None:
        self._begun = False

    def of(self, tensor: T) -> T:
        """The tensor on the host, from `wait` on; itself where it is there."""
        if tensor.device.type == "cpu":
            return tensor
        self._begun = True
        room = get_accelerator().pin_memory(torch.empty(tensor.shape, dtype=tensor.dtype))
        return room.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Until all copies are there."""
        if self._begun:
            get_accelerator().synchronize()
        self._begun = False
