"""Small files and thumbnails of images and videos."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..data.imaging import evenly_spaced, to_rgb, video_frames
from ..errors import DataError

IMAGE_SIDE = 512  # pixels; longer sides are scaled down before an image of a rollout is stored
PNG_PIXELS = 128 * 128  # up to this size lossless PNG is small enough
STRIP_FRAMES = 8


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
    shown = evenly_spaced(frames, count)
    width = max(1, round(frames[0].width * height / frames[0].height))
    strip = Image.new("RGB", (len(shown) * (width + 2) - 2, height), "white")
    for column, frame in enumerate(shown):
        strip.paste(frame.resize((width, height), Image.LANCZOS), (column * (width + 2), 0))
    return strip


def encode(image: Image.Image, lossless: bool, quality: int = 85) -> tuple[bytes, str]:
    """File content and suffix."""
    buffer = io.BytesIO()
    if lossless:
        image.save(buffer, "PNG", optimize=True)
        return buffer.getvalue(), ".png"
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue(), ".jpg"


def save_image(folder: Path, image: Any) -> str:
    """Store a small copy under `folder`/images, named by content, and give its relative path.

    image: PIL, an array or a tensor, see `data.imaging.to_pil`. Raises DataError for anything else.
    """
    image = fit(to_rgb(image), IMAGE_SIDE)
    return store(folder, image, lossless=image.width * image.height <= PNG_PIXELS)


def save_video(folder: Path, video: Any) -> str:
    """Store a strip of a video's frames like an image; video: see `data.imaging.frames_first`."""
    return store(folder, film_strip(video_frames(video)), lossless=False)


def store(folder: Path, image: Image.Image, lossless: bool) -> str:
    """Write the image under `folder`/images unless it is there; equal images share a file. Gives the relative path."""
    digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()[:20]
    target = folder / "images" / (digest + (".png" if lossless else ".jpg"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name("." + target.name)
        partial.write_bytes(encode(image, lossless)[0])
        partial.replace(target)
    return f"images/{target.name}"


def data_uri(image: Image.Image, side: int, quality: int = 72) -> str:
    """A thumbnail for the report: the smaller of PNG and JPEG."""
    image = fit(image, side)
    choices = [(encode(image, False, quality)[0], "jpeg")]
    if image.width * image.height <= PNG_PIXELS:
        choices.append((encode(image, True)[0], "png"))
    content, kind = min(choices, key=lambda choice: len(choice[0]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
