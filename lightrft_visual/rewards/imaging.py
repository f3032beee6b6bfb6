"""Images and videos between tensors, PIL and bytes. Decoding is bounded: size is read before any pixel is."""

import base64
import binascii
import io
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError

from ..data import media as imaging
from ..errors import DataError, RewardError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PIXELS = 50_000_000
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def to_pil(image: Any) -> Image.Image | None:
    """`data.media.to_pil` of an image to score; None stays None.

    Raises RewardError for what is no image, and for floats that are not finite: a score of them would mean nothing.
    """
    if image is None:
        return None
    if not is_finite(image):
        raise RewardError("an image to score has values that are not finite")
    try:
        return imaging.to_pil(image)
    except DataError as error:
        raise RewardError(f"an image to score: {error}") from error


def is_finite(media: Any) -> bool:
    """Whether an image or video has neither NaN nor infinity in it."""
    if not isinstance(media, torch.Tensor):
        return True
    return bool(torch.isfinite(media.sum())) or bool(torch.isfinite(media).all())  # a sum of large values may not be


def video_frames(video: Any, count: int | None = None) -> list[Image.Image]:
    """Frames of a video to score as PIL; with `count`, at most that many, evenly spaced, first and last included.

    video: see `data.media.frames_first`; frames that are None are left out. Raises RewardError as `to_pil` does.
    """
    try:
        frames = imaging.frames_first(video)
    except DataError as error:
        raise RewardError(f"a video to score: {error}") from error
    chosen = frames if count is None else imaging.evenly_spaced(frames, count)
    return [frame for frame in map(to_pil, chosen) if frame is not None]


def encode_image(image: Any, image_format: str = "png") -> str:
    """Base64 of a lossless PNG, or of a JPEG of quality 95."""
    opened = to_pil(image)
    if image_format == "jpeg":
        content = imaging.encoded(opened.convert("RGB"), "JPEG", quality=95)
    else:
        lossless = opened if opened.mode in _PNG_MODES else opened.convert("RGB")
        content = imaging.encoded(lossless, "PNG", compress_level=1)
    return base64.b64encode(content).decode()


@dataclass
class EncodedImages:
    """Encodes each image or video once, however many samples, requests and servers share it; of more than `most`
    characters the oldest are forgotten. Safe between threads."""

    most: int = 2**30
    _kept: int = 0
    _done: dict[tuple[int, str], tuple[Any, Future[Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def encode(self, image: Any, image_format: str = "png") -> str | None:
        """Base64 of the image, None for None."""
        return None if image is None else self._once(image, image_format, lambda: encode_image(image, image_format))

    def frames(self, video: Any, image_format: str = "png") -> list[str]:
        """Base64 of each frame of the video; the frames are not kept."""
        return self._once(video, image_format, lambda: [encode_image(f, image_format) for f in video_frames(video)])

    def _once(self, media: Any, image_format: str, encode: Callable[[], Any]) -> Any:
        key = (id(media), image_format)
        with self._lock:
            mine = key not in self._done
            if mine:
                self._done[key] = (media, Future())  # holding it keeps its id its own
            result = self._done[key][1]
        if mine:
            try:
                result.set_result(encode())
            except Exception as error:
                result.set_exception(error)
            with self._lock:
                self._kept += _characters(result)
                while self._kept > self.most:  # who waits for an encoding has it
                    key, (_, oldest) = next(iter(self._done.items()))
                    if not oldest.done():
                        break
                    del self._done[key]
                    self._kept -= _characters(oldest)
        return result.result()


def _characters(encoded: Future[Any]) -> int:
    if encoded.exception() is not None:
        return 0
    found = encoded.result()
    return sum(map(len, found)) if isinstance(found, list) else len(found)


def decode_image(text: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image from base64, in its own mode: known formats only, at most max_pixels, which is checked before decoding.

    Raises DataError, without repeating the data."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise DataError("an image is not valid base64") from error
    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
        if opened.width * opened.height > max_pixels:
            raise DataError(f"an image has {opened.width} x {opened.height} pixels; the limit is {max_pixels}")
        opened.load()
    except DataError:
        raise
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        told = f"an image cannot be decoded ({type(error).__name__}); allowed are {', '.join(FORMATS)}"
        raise DataError(told) from None
    return opened
