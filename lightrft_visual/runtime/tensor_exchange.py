"""Objects between ranks as bytes: tensors and images travel raw, and only what is around them is pickled.

A parcel is the length of the pickle in 8 bytes, the pickle, and then the content of every tensor and image that the
object holds. One that is met several times is there once.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch
from PIL import Image

T = torch.Tensor
LENGTH = 8  # bytes of the pickle's length
ALIGNED = 16  # bytes: from such a place, numbers of any type are read
SIMPLE_MODES = ("L", "RGB", "RGBA")  # of images that are nothing but their pixels


class _TensorAt(NamedTuple):
    """A tensor whose numbers lie `start` bytes behind the pickle."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _ImageAt(NamedTuple):
    """An image whose pixels lie `start` bytes behind the pickle."""

    start: int
    size: tuple[int, int]
    mode: str


class _Packer(pickle.Pickler):
    """Pickles an object except for its tensors and images, whose content it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.contents: list[tuple[int, T]] = []  # where each begins, and its bytes
        self.end = 0
        self._met: dict[int, tuple[Any, _TensorAt | _ImageAt]] = {}  # with what was met, so that its id stays its own

    def persistent_id(self, value: Any) -> _TensorAt | _ImageAt | None:
        """What stands in the pickle for a tensor or an image; None for everything else, which is pickled."""
        image = type(value) is Image.Image and value.mode in SIMPLE_MODES and not value.info
        if not image and type(value) is not torch.Tensor:
            return None
        if id(value) not in self._met:
            where = self._image(value) if image else self._tensor(value)
            self._met[id(value)] = value, where
        return self._met[id(value)][1]

    def _tensor(self, value: T) -> _TensorAt:
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _TensorAt(self._add(content), tuple(value.shape), value.dtype)

    def _image(self, value: Image.Image) -> _ImageAt:
        return _ImageAt(self._add(_as_tensor(value.tobytes())), value.size, value.mode)

    def _add(self, content: T) -> int:
        start = self.end
        self.contents.append((start, content))
        self.end = _aligned(start + len(content))
        return start


class _Unpacker(pickle.Unpickler):
    """Reads a pickle whose tensors and images lie in `contents`; each gets memory of its own."""

    def __init__(self, file: io.BytesIO, contents: T) -> None:
        super().__init__(file)
        self._contents = contents
        self._made: dict[tuple, T | Image.Image] = {}

    def persistent_load(self, where: _TensorAt | _ImageAt) -> T | Image.Image:
        """The tensor or image that `where` describes, the same one for the same place."""
        key = type(where), where
        if key not in self._made:
            self._made[key] = self._tensor(where) if isinstance(where, _TensorAt) else self._image(where)
        return self._made[key]

    def _tensor(self, where: _TensorAt) -> T:
        made = torch.empty(where.shape, dtype=where.dtype)
        made.view(-1).view(torch.uint8).copy_(self._contents[where.start : where.start + made.nbytes])
        return made

    def _image(self, where: _ImageAt) -> Image.Image:
        size = where.size[0] * where.size[1] * len(where.mode)
        return Image.frombytes(where.mode, where.size, self._contents[where.start : where.start + size].numpy())


def pack(value: Any) -> T:
    """(n) uint8 on the host: an object as a parcel. Tensors of an accelerator arrive on the host."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    head = file.getbuffer()
    first = _aligned(LENGTH + len(head))
    buffer = torch.empty(first + packer.end, dtype=torch.uint8)
    buffer[:LENGTH].view(torch.int64)[0] = len(head)
    buffer[LENGTH : LENGTH + len(head)] = _as_tensor(head)
    for start, content in packer.contents:
        buffer[first + start : first + start + len(content)] = content
    return buffer


def unpack(buffer: T) -> Any:
    """The object of a parcel on the host. Parcels between ranks only: never data from outside, as pickles run code."""
    length = int(buffer[:LENGTH].view(torch.int64))
    head = io.BytesIO(buffer[LENGTH : LENGTH + length].numpy().tobytes())
    return _Unpacker(head, buffer[_aligned(LENGTH + length) :]).load()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _as_tensor(content: bytes | memoryview) -> T:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
    )
