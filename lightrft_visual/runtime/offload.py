"""Models and tensors that take turns on an accelerator."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Self

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from .host_copies import HostMemory, bytes_of, pinned

T = torch.Tensor
SMALL_PIECE = 2**26  # bytes that are not divided any further


@contextmanager
def on_device(module: nn.Module, device: torch.device | str, offload: bool) -> Iterator[nn.Module]:
    """The module in evaluation mode on a device, without gradients.

    Args:
        module: on the CPU or the device.
        device: of the forward passes inside.
        offload: the module is on the CPU afterwards. What came from there is not copied back: nobody changes it inside.
    """
    leaves = offload and torch.device(device).type != "cpu"
    tensors = chain(module.parameters(), module.buffers()) if leaves else ()
    homes = [(each, each.data) for each in tensors if each.device.type == "cpu"]
    module.to(device, non_blocking=True).eval()
    try:
        with torch.no_grad():
            yield module
    finally:
        for tensor, home in homes:
            tensor.data = home
        if leaves:
            module.to("cpu")  # what was on the device before


class OptimizerOffload:
    """Tensors that give their memory on the device back for a while, their numbers waiting on the host.

    Storages are emptied and filled again, as FSDP does it, so the tensors, their views and whoever holds them stay what
    they are. Inside, nobody may touch them. The host memory is kept for the next time.
    """

    def __init__(self) -> None:
        self.away: list[tuple[torch.UntypedStorage, int, list[T]]] = []  # storages, whose pieces are on the host
        self.memory = HostMemory()

    def leave(self, tensors: Iterable[T], scratch: Iterable[T] = ()) -> None:
        """Move the whole storages of these tensors; those that lie in a file's memory map stay there.

        scratch: tensors of which nobody needs the numbers again; they come back with others.
        """
        leaving = [(each, True) for each in _storages(tensors)] + [(each, False) for each in _storages(scratch)]
        for storage, kept in leaving:
            waiting = [self.memory.copy_of(piece) for piece in pieces_of(storage)] if kept else []
            self.away.append((storage, storage.nbytes(), waiting))
            storage.resize_(0)
        get_accelerator().empty_cache()

    def come_back(self) -> None:
        """Move what is away to the device again; nothing where nothing is."""
        for storage, size, waiting in self.away:
            storage.resize_(size)
            for piece, kept in zip(pieces_of(storage), waiting):
                piece.copy_(kept)
                self.memory.give_back(kept)
        self.away.clear()


def pieces_of(storage: torch.UntypedStorage) -> Sequence[T]:
    """Its bytes in powers of two and a small rest: PyTorch gives out page-locked memory in powers of two, and weights
    of 17 GB would take 32 GiB."""
    sizes, rest = [], storage.nbytes()
    while rest > SMALL_PIECE:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return bytes_of(storage).split([*sizes, rest] if rest else sizes)


def _storages(tensors: Iterable[T]) -> list[torch.UntypedStorage]:
    """The distinct storages under tensors that hold something and can be emptied."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes() and storage.resizable()]


def empty_storages(tensors: Iterable[T]) -> None:
    """Give the memory of tensors back whose numbers nobody needs again, whoever still holds them."""
    for storage in _storages(tensors):
        storage.resize_(0)


class OffloadedModule:
    """A frozen model whose weights live on the host, and are on the device inside `with model:` and while it is called.

    score: what a call does, a function of the model's inputs.
    """

    def __init__(self, module: nn.Module, score: Callable[..., Any], device: torch.device) -> None:
        self.module, self.score, self.device = module, score, device
        for parameter in module.parameters():
            parameter.data = pinned(parameter.data.to("cpu"))
        self._visits, self._stay = 0, ExitStack()

    def __call__(self, *arguments: Any) -> Any:
        with self:
            return self.score(*arguments)

    def __enter__(self) -> Self:
        if not self._visits:
            self._stay.enter_context(on_device(self.module, self.device, offload=True))
        self._visits += 1
        return self

    def __exit__(self, *failure: object) -> None:
        self._visits -= 1
        if not self._visits:
            self._stay.close()
