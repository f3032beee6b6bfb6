"""Pictures of any kind to PIL, and small files of them."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import DataError

PICTURE_SIDE = 512  # pixels; longer sides are scaled down before a rollout picture is stored
PNG_PIXELS = 128 * 128  # up to this size lossless PNG is small enough
STRIP_FRAMES = 8
DataUri = str


def to_pil(picture: Any) -> Image.Image:
    """RGB image of a PIL image, a path, or an array or tensor.

    Arrays: [H, W], [H, W, 3] or [C, H, W] with C of 1 or 3, uint8, or floats in 0..1 that are clamped and rounded.
    DataError otherwise.
    """
    if isinstance(picture, Image.Image):
        return flatten_alpha(picture)
    if isinstance(picture, str | Path):
        with Image.open(picture) as opened:
            return flatten_alpha(opened)
    if isinstance(picture, torch.Tensor):
        picture = picture.detach().float().cpu().numpy() if picture.is_floating_point() else picture.cpu().numpy()
    if isinstance(picture, np.ndarray):
        return array_to_pil(picture)
    raise DataError(f"a picture is a PIL image, a path, an array or a tensor, not {type(picture).__name__}")


def flatten_alpha(image: Image.Image) -> Image.Image:
    """RGB, transparent parts on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def array_to_pil(array: np.ndarray) -> Image.Image:
    if np.issubdtype(array.dtype, np.floating):
        array = np.rint(np.nan_to_num(array).clip(0, 1) * 255).astype(np.uint8)
    if array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] in (1, 3):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] != 3):
        raise DataError(f"not a picture: array of shape {array.shape} and type {array.dtype}")
    return Image.fromarray(array).convert("RGB")


def video_frames(video: Any) -> list[Image.Image]:
    """Frames of a video: a sequence of pictures, [T, H, W, 3], [T, C, H, W], or a float tensor [C, T, H, W] in 0..1."""
    if isinstance(video, torch.Tensor) and video.is_floating_point() and video.ndim == 4 and video.shape[0] in (1, 3):
        video = video.transpose(0, 1)
    if isinstance(video, torch.Tensor | np.ndarray) and video.ndim != 4:
        raise DataError(f"not a video: shape {tuple(video.shape)}, expected four dimensions")
    return [to_pil(frame) for frame in video]


def is_video(media: Any) -> bool:
    """True for four-dimensional arrays and for sequences of frames."""
    if isinstance(media, torch.Tensor | np.ndarray):
        return media.ndim == 4
    return isinstance(media, Sequence) and not isinstance(media, str)


def fit(image: Image.Image, side: int) -> Image.Image:
    """Scaled down so that no side is longer than `side`; never up."""
    if max(image.size) <= side:
        return image
    scale = side / max(image.size)
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.LANCZOS)


def film_strip(frames: Sequence[Image.Image], count: int = STRIP_FRAMES, height: int = 128) -> Image.Image:
    """Up to `count` evenly spaced frames side by side, the first and the last included."""
    if not frames:
        raise DataError("a video without frames")
    count = min(count, len(frames))
    places = [round(index * (len(frames) - 1) / max(1, count - 1)) for index in range(count)]
    width = max(1, round(frames[0].width * height / frames[0].height))
    strip = Image.new("RGB", (count * (width + 2) - 2, height), "white")
    for column, place in enumerate(places):
        strip.paste(frames[place].resize((width, height), Image.LANCZOS), (column * (width + 2), 0))
    return strip


def encode(image: Image.Image, lossless: bool, quality: int = 85) -> tuple[bytes, str]:
    """File content and suffix."""
    buffer = io.BytesIO()
    if lossless:
        image.save(buffer, "PNG", optimize=True)
        return buffer.getvalue(), ".png"
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue(), ".jpg"


def save_picture(folder: Path, picture: Any) -> str:
    """Store a small copy under `folder`/images, named by content, and give its relative path."""
    image = fit(to_pil(picture), PICTURE_SIDE)
    return store(folder, image, lossless=image.width * image.height <= PNG_PIXELS)


def save_video(folder: Path, video: Any) -> str:
    """Store a strip of frames like a picture."""
    return store(folder, film_strip(video_frames(video)), lossless=False)


def store(folder: Path, image: Image.Image, lossless: bool) -> str:
    digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()[:20]
    target = folder / "images" / (digest + (".png" if lossless else ".jpg"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name("." + target.name)
        partial.write_bytes(encode(image, lossless)[0])
        partial.replace(target)
    return f"images/{target.name}"


def data_uri(image: Image.Image, side: int, quality: int = 72) -> DataUri:
    """A thumbnail for the report: the smaller of PNG and JPEG."""
    image = fit(image, side)
    choices = [(encode(image, False, quality)[0], "jpeg")]
    if image.width * image.height <= PNG_PIXELS:
        choices.append((encode(image, True)[0], "png"))
    content, kind = min(choices, key=lambda choice: len(choice[0]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
