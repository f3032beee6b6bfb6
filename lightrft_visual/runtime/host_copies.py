"""Copies between host and device that make the host wait for the device as seldom as possible."""

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = torch.Tensor
LEAST_PINNED = 2**16  # bytes; CUDA copies fewer at once, from whatever memory
MOST_PINNED = 2**26  # bytes of a copy that page-locked memory is taken for, which is scarce and comes in powers of two
_kept = WeakTensorKeyDictionary()  # tensors on a device, what they were copied from, and their version then
_placed: WeakValueDictionary[int, T] = WeakValueDictionary()  # the same tensors by their address


def to_device(tensor: T, device: torch.device | str) -> T:
    """The tensor on `device`; the host's is remembered as long as that one lives. For what is read and never changed:
    ids, masks, sizes, pixels. What is changed in place is known no more.

    None but the largest wait for what the device is still computing: small ones do not by themselves, others go by
    page-locked memory."""
    away = torch.device(device).type != "cpu"
    by_pinned = away and tensor.device.type == "cpu" and LEAST_PINNED < tensor.nbytes <= MOST_PINNED
    moved = (pinned(tensor) if by_pinned else tensor).to(device, non_blocking=away)
    if moved is not tensor and tensor.device.type == "cpu":
        _kept[moved] = tensor, _version(moved)
        if moved.layout is torch.strided:
            _placed[moved.data_ptr()] = moved
    return moved


def known_on_host(tensor: T) -> T | None:
    """The tensor on the host without waiting for the device; None where there is none."""
    if tensor.device.type == "cpu":
        return tensor
    if tensor not in _kept and not tensor.is_meta:
        whole = _placed.get(_view(tensor)[0])  # a module gets other objects of its inputs under ZeRO-3
        tensor = whole if whole is not None and _view(whole) == _view(tensor) else tensor
    known, version = _kept.get(tensor, (None, None))
    return known if version == _version(tensor) else None


def _version(tensor: T) -> int | None:
    """How often it was changed in place; tensors of inference mode do not count that."""
    return None if tensor.is_inference() else tensor._version


def _view(tensor: T) -> tuple:
    """Which memory a tensor is, and how it is read; nothing is read."""
    where = (tensor.data_ptr(), tensor.stride()) if tensor.layout is torch.strided else (None, None)
    return (*where, tensor.device, tensor.dtype, tensor.shape)


def on_host(tensor: T) -> T:
    """The tensor on the host: what `to_device` has copied, else a copy that waits for the device."""
    known = known_on_host(tensor)
    return tensor.detach().cpu() if known is None else known


def taken(numbers: T, columns: T) -> T:
    """(B): of each of (B, K) numbers the one in its column (B). The host knows them where it knows both."""
    known, at = known_on_host(numbers), known_on_host(columns)
    if known is None or at is None:
        return numbers.gather(1, columns[:, None])[:, 0]
    return to_device(known.gather(1, at[:, None])[:, 0], numbers.device)


def pins() -> bool:
    """Whether there is an accelerator, which copies faster from page-locked memory."""
    from deepspeed.accelerator import get_accelerator  # a reward server copies nothing and starts without it

    return get_accelerator().device_name() != "cpu"


def pinned(tensor: T) -> T:
    """A host tensor in page-locked memory where that is faster. PyTorch keeps the memory until copies from it are done;
    DeepSpeed's own (DS_PIN_MEMORY_BACKEND=native) frees it with the tensor."""
    return tensor.pin_memory() if pins() else tensor


def bytes_of(storage: torch.UntypedStorage) -> T:
    """(n) uint8: all of it, where it is."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class HostMemory:
    """Copies of bytes in host memory, page-locked where it can be, that is kept for the next ones of a size."""

    def __init__(self) -> None:
        self.free: dict[int, list[T]] = {}

    def copy_of(self, content: T) -> T:
        """content: (n) uint8."""
        same_size = self.free.get(content.nbytes)
        copied = same_size.pop() if same_size else torch.empty(content.nbytes, dtype=torch.uint8, pin_memory=pins())
        return copied.copy_(content)

    def give_back(self, copied: T) -> None:
        """For the next copies."""
        self.free.setdefault(copied.nbytes, []).append(copied)


@dataclass
class HostCopies:
    """Copies to the host that do not wait for the device, but those of large tensors; they hold numbers once `wait`
    has."""

    _begun: bool = False

    def of(self, tensor: T) -> T:
        """The tensor on the host, from `wait` on; itself where it is there."""
        if tensor.device.type == "cpu":
            return tensor
        if tensor.nbytes > MOST_PINNED:
            return tensor.detach().cpu()
        self._begun = True
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins())
        return room.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Until all copies are there."""
        if self._begun:
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
        self._begun = False
