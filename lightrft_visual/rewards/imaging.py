"""Pictures and videos between tensors, PIL and bytes. Decoding is bounded: size is read before any pixel is."""

from __future__ import annotations

import base64
import binascii
import io
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from ..errors import DataError, RewardError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PIXELS = 50_000_000
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def to_pil(image: Any) -> Image.Image | None:
    """A PIL picture from PIL, a (C, H, W) float tensor in 0..1, or an (H, W, C) uint8 array; None stays None.

    Raises RewardError for anything else, and for a float tensor that is not finite.
    """
    if image is None or isinstance(image, Image.Image):
        return image
    if isinstance(image, torch.Tensor) and image.ndim == 3 and image.shape[0] in (1, 3):
        return Image.fromarray(_to_uint8(image).permute(1, 2, 0).numpy().squeeze(2 if image.shape[0] == 1 else ()))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        return Image.fromarray(image)
    shape = f" of shape {tuple(image.shape)}" if isinstance(image, (torch.Tensor, np.ndarray)) else ""
    raise RewardError(f"a picture to score is a {type(image).__name__}{shape}; give PIL or a (C, H, W) tensor in 0..1")


def _to_uint8(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.uint8:
        return tensor.detach().cpu()
    tensor = tensor.detach().float().cpu()
    if not torch.isfinite(tensor).all():
        raise RewardError("a picture to score has values that are not finite")
    return (tensor.clamp(0, 1) * 255).round().to(torch.uint8)


def video_frames(video: Any, count: int | None = None) -> list[Image.Image]:
    """Frames of a video as PIL; with `count`, at most that many, evenly spaced, first and last included.

    video: a list of pictures, a (C, T, H, W) float tensor in 0..1, or a (T, C, H, W) uint8 tensor or array.
    """
    frames: Sequence[Any]
    if isinstance(video, np.ndarray):
        video = torch.from_numpy(video)
    if isinstance(video, torch.Tensor):
        if video.ndim != 4:
            raise RewardError(
                f"a video to score has shape {tuple(video.shape)}; give (C, T, H, W) or uint8 (T, C, H, W)"
            )
        frames = list(video) if video.dtype == torch.uint8 else list(video.transpose(0, 1))
    else:
        frames = list(video)
    if count is not None and len(frames) > count:
        places = np.linspace(0, len(frames) - 1, count).round().astype(int)
        frames = [frames[i] for i in places]
    return [frame for frame in map(to_pil, frames) if frame is not None]


def encode_image(image: Any, image_format: str = "png") -> str:
    """Base64 of a lossless PNG, or of a JPEG of quality 95."""
    picture = to_pil(image)
    buffer = io.BytesIO()
    if image_format == "jpeg":
        picture.convert("RGB").save(buffer, "JPEG", quality=95)
    else:
        lossless = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
        lossless.save(buffer, "PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


class EncodedImages:
    """Encodes each picture object once, however many samples, requests and servers share it. Safe between threads."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, str], tuple[Any, Future[str]]] = {}
        self._lock = threading.Lock()

    def encode(self, image: Any, image_format: str = "png") -> str | None:
        """Base64 of the picture, None for None."""
        if image is None:
            return None
        key = (id(image), image_format)
        with self._lock:
            mine = key not in self._done
            if mine:
                self._done[key] = (image, Future())  # holding the image keeps its id its own
            result = self._done[key][1]
        if mine:
            try:
                result.set_result(encode_image(image, image_format))
            except Exception as error:
                result.set_exception(error)
        return result.result()


def decode_image(text: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture from base64, in its own mode. Raises DataError, without repeating the data."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise DataError("an image is not valid base64") from error
    return decode_bytes(data, max_pixels)


def decode_bytes(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture from file bytes: known formats only, at most max_pixels, which is checked before decoding."""
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        if picture.width * picture.height > max_pixels:
            raise DataError(f"an image has {picture.width} x {picture.height} pixels; the limit is {max_pixels}")
        picture.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"an image cannot be decoded ({type(error).__name__}); allowed are {', '.join(FORMATS)}"
        ) from None
    return picture
