"""Images and videos in memory between tensors, arrays and PIL. What rows name is read and checked by media.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from ..errors import DataError

Item = TypeVar("Item")


class Video(NamedTuple):
    """Frames of one video and when they were taken; the pair is what vLLM takes as one item of multi_modal_data.

    It is a tuple of two, not a sequence of frames: read `frames`.

    frames: uint8 array [T, H, W, 3]. metadata: fps of the original, frames_indices in it, total_num_frames, duration
    in seconds, video_backend, and do_sample_frames = False: the frames are already chosen.
    """

    frames: np.ndarray
    metadata: dict[str, Any]


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / max(1, count - 1))] for index in range(count)]


def to_uint8(media: torch.Tensor) -> torch.Tensor:
    """A uint8 tensor of the same shape on the host, with a storage of its own.

    Floats are taken as 0..1, clamped and rounded to the nearest of 256 levels; NaN becomes 0.
    """
    if media.is_floating_point():
        media = media.detach().float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    return media.detach().cpu().clone(memory_format=torch.contiguous_format)


def to_pil(image: Any) -> Image.Image:
    """A PIL image; one that is PIL already is returned as it is, in its own mode.

    Args:
        image: PIL, or an array or tensor [H, W], [H, W, 3 or 4] or [C, H, W] with C of 1 or 3; uint8, or floats
            as `to_uint8` takes them.

    Raises:
        DataError: for anything else.
    """
    if isinstance(image, Image.Image):
        return image
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise DataError(f"an image is a PIL image, an array or a tensor, not {type(image).__name__}")
    array = _as_uint8_array(image)
    if array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] in (1, 3):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[-1] not in (3, 4)):
        raise DataError(f"not an image: shape {tuple(image.shape)}; expected [H, W], [H, W, 3] or [C, H, W]")
    return Image.fromarray(array)


def _as_uint8_array(media: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(media, np.ndarray) and media.dtype == np.uint8:
        return media
    tensor = torch.as_tensor(media)
    if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
        raise DataError(f"not an image: type {media.dtype}; expected uint8, or floats in 0..1")
    return to_uint8(tensor).numpy()


def to_rgb(image: Any) -> Image.Image:
    """`to_pil` in RGB, transparent parts on white."""
    image = to_pil(image)
    if image.has_transparency_data:
        upper = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
    return image.convert("RGB")


def is_video(media: Any) -> bool:
    """True for a `Video`, for four-dimensional arrays and tensors, and for sequences of frames."""
    if isinstance(media, torch.Tensor | np.ndarray):
        return media.ndim == 4
    return isinstance(media, Sequence) and not isinstance(media, str)


def frames_first(video: Any) -> Sequence[Any]:
    """The frames of a video in order, as views: a `Video`, a sequence of images, an array or tensor [T, ...], or the
    model's floats [C, T, H, W] with C of 1 or 3. Raises DataError for an array or tensor without four axes."""
    if isinstance(video, Video):
        video = video.frames
    if not isinstance(video, torch.Tensor | np.ndarray):
        return list(video)
    if video.ndim != 4:
        raise DataError(f"not a video: shape {tuple(video.shape)}, expected four dimensions")
    tensor = torch.as_tensor(video)
    return tensor.transpose(0, 1) if tensor.is_floating_point() and tensor.shape[0] in (1, 3) else tensor


def video_frames(video: Any, count: int | None = None) -> list[Image.Image]:
    """Frames of a video in RGB; with `count`, at most that many, evenly spaced, first and last included.

    video: see `frames_first`. Raises DataError for what is no video.
    """
    frames = frames_first(video)
    return [to_rgb(frame) for frame in (frames if count is None else evenly_spaced(frames, count))]
