"""Objects between ranks as bytes: tensors and images travel raw, and only what is around them is pickled.

It is a pickle of protocol 5 with its buffers behind it: the content of every tensor and image that the object
holds. One that is met several times is there once.
"""

import io
import pickle
from typing import Any

import torch
from PIL import Image

T = torch.Tensor
SIMPLE_MODES = ("L", "RGB", "RGBA")  # of images that are nothing but their pixels


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tensor's numbers and an image's pixels as a buffer; all else is pickled as usual."""
        if type(value) is torch.Tensor:
            numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(numbers), value.dtype, tuple(value.shape))
        if type(value) is Image.Image and value.mode in SIMPLE_MODES and not value.info:
            return Image.frombytes, (value.mode, value.size, pickle.PickleBuffer(value.tobytes()))
        return NotImplemented


def _tensor(numbers: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> T:
    """With memory of its own: a view would keep all of what came."""
    made = torch.empty(shape, dtype=dtype)
    made.view(-1).view(torch.uint8).numpy()[:] = numbers
    return made


def pack(value: Any) -> T:
    """(n) uint8 on the host: an object as one tensor. Tensors of an accelerator arrive on the host."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(file, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [memoryview(each).cast("B") for each in (file.getbuffer(), *buffers)]
    lengths = torch.tensor([len(parts), *map(len, parts)]).view(torch.uint8).numpy()
    packed = torch.empty(len(lengths) + sum(map(len, parts)), dtype=torch.uint8)
    target, start = memoryview(packed.numpy()), 0
    for each in (memoryview(lengths), *parts):
        target[start : start + len(each)] = each
        start += len(each)
    return packed


def unpack(packed: T) -> Any:
    """The object that was packed, on the host. Between ranks only: never data from outside, as pickles run code."""
    content = memoryview(packed.numpy())
    count = int.from_bytes(content[:8], "little")
    start, parts = 8 * (count + 1), []
    for length in packed[8:start].view(torch.int64).tolist():
        parts.append(content[start : start + length])
        start += length
    return pickle.loads(parts[0], buffers=parts[1:])
