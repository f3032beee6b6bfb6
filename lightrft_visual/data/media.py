"""Images and videos of data rows, decoded with care: what a row names is checked before it is decoded.

A source of an image is a PIL image, bytes, a path, a file:// URL, an http(s) URL (only with allow_remote), a data: URL,
a base64 string, or a mapping as Hugging Face, chat messages and verl write them: {"bytes", "path"}, {"url"} or
{"image"}. Every failure is a DataError that names the source, never its bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps

from ..errors import DataError
from ..runtime.masking import shown_url
from .safe_fetch import fetch_bytes

if TYPE_CHECKING:  # where there are no tensors, torch takes seconds and makes a process slow to copy
    import torch

# No vector formats: Pillow hands those (EPS, WMF) to external programs. JPEG includes MPO.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_IMAGE_PIXELS = 50_000_000
MAX_FRAMES = 768  # of a video
MAX_ASPECT_RATIO = 200  # as Qwen's image processors have it
MAX_FILE_BYTES = 512 * 2**20
FETCH_TIMEOUT = 30.0  # seconds
_SIZE_SETTINGS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_SUFFIXES = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "video": (".mp4", ".webm", ".mkv", ".mov", ".avi"),
}
ANY_KIND = ("path", "file", "file_name")  # columns of media whose names say no kind
_MEDIA_NAME = {
    kind: re.compile(f"{names}|^({'|'.join(ANY_KIND)})$", re.IGNORECASE)
    for kind, names in (("image", "image|img|picture|photo|pic(s|$)|frame"), ("video", "video|clip|movie"))
}
_ORIENTATION = 0x0112  # EXIF tag
_TURNED_BY = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}  # what of a PNG's header may hold it
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*", b"P5", b"P6")
_LOCKS = [Lock() for _ in range(64)]  # of PIL images


def describe_source(source: Any) -> str:
    """A short name for messages: a path, a URL without its query, or a type and size; never the content."""
    if isinstance(source, Mapping):
        return describe_source(_held(source, "path", "url", "image", "bytes"))
    if isinstance(source, (bytes, bytearray)):
        return f"<{len(source)} bytes>"
    if isinstance(source, Image.Image):
        return f"<PIL image {source.width}x{source.height}>"
    if not isinstance(source, (str, os.PathLike)):
        return f"<{type(source).__name__}>"
    text = os.fspath(source)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(text, str) else repr(text)
    if text.startswith("data:") or is_base64_image(text):
        return f"<base64 of {len(text)} characters>"
    if "://" in text:
        return shown_url(text)
    return text if len(text) <= 300 else text[:300] + "..."


def load_image(source: Any, *, allow_remote: bool = False, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode one image to 8-bit RGB, upright (EXIF orientation applied), transparency over white.

    16-bit greys are scaled to 8 bits, CMYK is converted. A PIL image that is all this already is returned itself,
    others are left as they are.

    Args:
        source: see the module.
        allow_remote: http(s) URLs are fetched; else they are refused.
        max_pixels: width times height above which the image is refused before any pixel is decoded.

    Raises:
        DataError: for what is missing, empty, truncated, corrupt, too large, animated, or not an image.
    """
    source = _pil_in(source)
    name = describe_source(source)
    with _as_data_error(f"image {name} is damaged"):
        with _lock_of(source):
            image = _open_image(source, name, allow_remote, max_pixels)
            image.load()  # reads all pixels, and closes the file
            _exif(image)  # which the image keeps
        return image if _is_plain(image) else _to_rgb(ImageOps.exif_transpose(image), name)


def image_size(source: Any, *, allow_remote: bool = False, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
    """(width, height) of the upright image, from its header alone. Refuses what load_image does, but for pixel data.

    Args: as of `load_image`.
    """
    source = _pil_in(source)
    name = describe_source(source)
    with _as_data_error(f"image {name} is damaged"), _lock_of(source):
        image = _open_image(source, name, allow_remote, max_pixels)
        # Pillow turns a TIFF's size itself. A PNG without EXIF or XMP in its header would be decoded in search of it.
        told = image.format == "TIFF" or (image.format == "PNG" and not _TURNED_BY & image.info.keys())
        exif = {} if told else _exif(image)
        size = image.size[::-1] if exif.get(_ORIENTATION, 1) in (5, 6, 7, 8) else image.size
        if image is not source:
            image.close()
        return size


def _exif(image: Image.Image) -> Mapping[int, Any]:
    """What of it can be read. Pillow raises what is wrong where it is first asked, but for JPEG."""
    with suppress(Exception):
        image.getexif()
    return image.getexif()


def _pil_in(source: Any) -> Any:
    """The PIL image of a mapping {"image": PIL}, or of a uint8 array; other sources as they are."""
    held = _inner_source(source) if isinstance(source, Mapping) else source
    if isinstance(held, np.ndarray) and held.dtype == np.uint8:
        return to_pil(held)
    return held if isinstance(held, Image.Image) else source


def _lock_of(source: Any) -> AbstractContextManager:
    """A PIL image reads its file when it is first asked for more than its size, by one thread at a time."""
    return _LOCKS[id(source) // 64 % len(_LOCKS)] if isinstance(source, Image.Image) else nullcontext()


@contextmanager
def _as_data_error(message: str) -> Iterator[None]:
    """Decoders raise every kind of exception on damaged data."""
    try:
        yield
    except DataError:
        raise
    except Image.DecompressionBombError as error:  # by its header: PIL's own limit comes before ours
        told = f"{message.removesuffix(' is damaged')} is too large for Pillow, whatever the settings are"
        raise DataError(f"{told}: {error}", "image too large") from error
    except Exception as error:
        raise DataError(f"{message}: {error}", "image damaged") from error


def _open_image(source: Any, name: str, allow_remote: bool, max_pixels: int) -> Image.Image:
    """Header only. A PIL image is taken as it is, and copied by whoever converts it."""
    if isinstance(source, Image.Image):
        image = source
    else:
        content = read_source(source, allow_remote=allow_remote)
        try:
            image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=IMAGE_FORMATS)
        except Image.UnidentifiedImageError:
            known = ", ".join(IMAGE_FORMATS)
            raise DataError(f"{name} is not an image of a known format ({known})", "not an image") from None
    _check_header(image, name, max_pixels)
    return image


def _check_header(image: Image.Image, name: str, max_pixels: int) -> None:
    if image.width < 1 or image.height < 1:
        raise DataError(f"image {name} is empty: {image.width}x{image.height} pixels", "image damaged")
    if image.width * image.height > max_pixels:
        raise DataError(
            f"image {name} has {image.width}x{image.height} pixels, above the limit of {max_pixels}: "
            "shrink the image, or in vision-language runs raise max_image_pixels",
            "image too large",
        )
    check_aspect_ratio(image.size, f"image {name}")
    # MPO holds previews after the image itself; elsewhere further frames are an animation or pages.
    if image.format in ("GIF", "WEBP", "PNG", "TIFF") and image.is_animated:
        advice = "give it as a video" if image.format == "GIF" else "give its frames as a list in videos"
        raise DataError(f"image {name} has more than one frame: {advice}, or save the frame you mean", "image animated")


def check_aspect_ratio(size: tuple[int, int], name: str) -> None:
    """Raise DataError for a side more than MAX_ASPECT_RATIO times the other. size: (width, height)."""
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise DataError(
            f"{name} has {size[0]}x{size[1]} pixels: one side is more than {MAX_ASPECT_RATIO} times the other",
            "image aspect ratio",
        )


def _is_plain(image: Image.Image) -> bool:
    """Whether it is what `load_image` gives, such as an image that was loaded before: it is not held twice."""
    upright = image.getexif().get(_ORIENTATION, 1) == 1
    return type(image) is Image.Image and image.mode == "RGB" and upright and not image.has_transparency_data


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(f"image {name} has grey levels outside 0..65535; scale it to 8 or 16 bits", "image levels")
        if image.mode == "I" and 0 < values.max() < 256:  # black, or clipped, were it taken for the other
            told = f"32-bit grey levels up to {values.max()}, which may be of 8 or of 16 bits; save it with as many"
            raise DataError(f"image {name} has {told}", "image levels")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise DataError(
            f"image {name} holds floating-point pixels of unknown range; scale it to 8 bits", "image levels"
        )
    return to_rgb(image)


def read_source(source: Any, *, allow_remote: bool = False) -> bytes | Path:
    """The encoded bytes of a source, or the path of the regular file that holds them. Raises DataError."""
    if isinstance(source, Mapping):
        return read_source(_inner_source(source), allow_remote=allow_remote)
    if isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) == 0:
            raise DataError("empty bytes", "media missing")
        return bytes(source)
    if isinstance(source, os.PathLike):
        return _regular_file(Path(source))
    if not isinstance(source, str):
        raise DataError(
            f"a {type(source).__name__} is no path, URL, bytes, base64, PIL image or uint8 array", "media form"
        )
    if is_remote(source):
        try:
            return fetch_bytes(source, allow_remote=allow_remote, max_bytes=MAX_FILE_BYTES, timeout=FETCH_TIMEOUT)
        except DataError as error:
            raise DataError(str(error), "not fetched") from error
    if source.startswith("data:"):
        return _decode_base64(source.partition("base64,")[2])
    if is_base64_image(source):
        return _decode_base64(source)
    if source.startswith("file://"):
        try:
            source = unquote(urlsplit(source).path)
        except ValueError as error:
            raise DataError(f"{describe_source(source)} is not a valid file URL: {error}", "file missing") from None
    if "://" in source and "::" in source:  # as datasets names a file inside a zip
        archive = source.rpartition("::")[2]
        raise DataError(f"its file is inside {archive}, and archives are not read: unpack it", "file in an archive")
    if "://" in source:
        told = f"{describe_source(source)}: of URLs only http(s) and file are read; copy or mount the storage"
        raise DataError(told, "file missing")
    return _regular_file(Path(source))


def _held(source: Mapping[str, Any], *keys: str) -> Any:
    """The first of these entries that holds something; None where none does. Arrays have no truth of their own."""
    entries = (source.get(key) for key in keys)
    return next((entry for entry in entries if hasattr(entry, "dtype") or entry), None)


def _inner_source(source: Mapping[str, Any]) -> Any:
    inner = _held(source, "bytes", "path", "url", "image")
    if inner is None or isinstance(inner, Mapping):
        keys = sorted(map(str, source))
        raise DataError(f"no bytes, path, url or image in a mapping with keys {keys}", "media missing")
    settings = sorted(key for key in source if source[key] is not None and key in _SIZE_SETTINGS)
    if settings:
        raise DataError(
            f"an image with its own {', '.join(settings)}; sizes are set by --max_pixels, --source_pixels", "media form"
        )
    return inner


def is_remote(source: Any) -> bool:
    """Whether reading this source would open a network connection."""
    if isinstance(source, Mapping) and _held(source, "bytes") is None:
        return is_remote(_held(source, "path", "url", "image"))
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def looks_like_media(name: str, value: Any, kind: str) -> bool:
    """Whether a column that nobody named holds images or videos: by its type, or by its name and content.

    Args:
        name: of the column.
        value: its cell in a row; of a list the first entry counts.
        kind: "image" or "video".
    """
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    if isinstance(value, Image.Image):
        return kind == "image"
    if isinstance(value, Mapping):
        content, named = _held(value, "bytes"), _has_suffix(value.get("path"), kind)
        return set(value) == {"bytes", "path"} and (named if content is None else _is_encoded(content, kind))
    if isinstance(value, bytes):
        return _is_encoded(value, kind)
    if not isinstance(value, str):
        return False
    if value.startswith("data:") or is_base64_image(value):
        return value.startswith(f"data:{kind}/") or (kind == "image" and is_base64_image(value))
    return bool(_MEDIA_NAME[kind].search(name)) and _has_suffix(value, kind)


def _is_encoded(content: Any, kind: str) -> bool:
    if not isinstance(content, bytes):
        return False
    is_image = content.startswith(_MAGIC) and content[8:12] != b"AVI "
    return is_image if kind == "image" else content[4:8] == b"ftyp" or content.startswith(b"\x1aE\xdf\xa3")


def _has_suffix(path: Any, kind: str) -> bool:
    return isinstance(path, str) and path.split("?")[0].lower().endswith(_SUFFIXES[kind])


def resolve_source(source: Any, root: str | os.PathLike | None) -> Any:
    """The same source with relative paths joined to root, so that it can be read from anywhere; "" stays."""
    if isinstance(source, Mapping) and _held(source, "bytes") is None:
        held = [key for key in ("path", "url", "image") if _held(source, key) is not None]
        return {**source, **{key: resolve_source(source[key], root) for key in held}}
    return os.path.join(root, source) if root is not None and is_path(source) and source != "" else source


def is_path(source: Any) -> bool:
    """Whether a source is written as a path, whatever is there."""
    if isinstance(source, str):
        return not ("://" in source or source.startswith("data:") or is_base64_image(source))
    return isinstance(source, os.PathLike)


def _regular_file(path: Path) -> Path:
    try:
        info = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        shown = describe_source(path)
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"file not found: {shown} ({reason})", "file missing") from None
    if not stat.S_ISREG(info.st_mode):  # a pipe or device would block or never end
        raise DataError(f"not a regular file: {path}", "file missing")
    if info.st_size == 0:
        raise DataError(f"file is empty: {path}", "file empty")
    if info.st_size > MAX_FILE_BYTES:
        raise DataError(
            f"file of {info.st_size} bytes is above the limit of {MAX_FILE_BYTES}: {path}", "file too large"
        )
    return path


def is_base64_image(text: str) -> bool:
    """Whether the text starts like base64 of a known image header; a path does not by accident."""
    if len(text) < 64:
        return False
    try:
        head = base64.b64decode(text[:64].lstrip()[:16], validate=True)
    except (binascii.Error, ValueError):
        return False
    return head.startswith(_MAGIC)


def _decode_base64(text: str) -> bytes:
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"<base64 of {len(text)} characters> is not valid base64: {error}", "not base64") from None
    if not content:
        raise DataError("a data URL without base64 content", "not base64")
    return content


def media_to_video_array(media: torch.Tensor) -> np.ndarray:
    """Turn one generated image [C, H, W] or video [C, T, H, W] with values in 0..1 into uint8 [T, C, H, W].

    Values are clamped to 0..1, then rounded to the nearest of 256 levels. The layout follows FastVideo.
    Raises ValueError for anything else: another number of axes, integers, or non-finite values.
    """
    import torch

    if not isinstance(media, torch.Tensor) or media.ndim not in (3, 4):
        shape = tuple(media.shape) if isinstance(media, torch.Tensor) else type(media).__name__
        raise ValueError(f"expected a tensor [C, H, W] or [C, T, H, W], got {shape}")
    if not media.is_floating_point():
        raise ValueError(f"expected floating-point values in 0..1, got {media.dtype}")
    if not torch.isfinite(media).all():
        raise ValueError("media holds NaN or infinite values")
    levels = to_uint8(media.unsqueeze(1) if media.ndim == 3 else media)
    return levels.permute(1, 0, 2, 3).contiguous().numpy()


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
    import torch

    if media.is_floating_point():
        media = media.detach().float().nan_to_num(0.0).clamp_(0, 1).mul_(255).round_().to(torch.uint8)
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
    import torch

    if not isinstance(image, torch.Tensor | np.ndarray):
        raise DataError(f"an image is a PIL image, an array or a tensor, not {type(image).__name__}")
    array = image
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        tensor = torch.as_tensor(image)
        if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
            raise DataError(f"not an image: type {image.dtype}; expected uint8, or floats in 0..1")
        array = to_uint8(tensor).numpy()
    if array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] == 3:
        return Image.merge("RGB", [Image.fromarray(channel) for channel in array])
    if array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[-1] not in (3, 4)):
        raise DataError(f"not an image: shape {tuple(image.shape)}; expected [H, W], [H, W, 3] or [C, H, W]")
    return Image.fromarray(array)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The content of an image's file. kind: "PNG" or "JPEG"; options: of Pillow's writer."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def to_rgb(image: Any) -> Image.Image:
    """`to_pil` in RGB, transparent parts on white."""
    image = to_pil(image)
    if image.has_transparency_data:
        upper = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
    return image.convert("RGB")


def pixel_hash(image: Image.Image) -> str:
    """The same for images of the same pixels."""
    return hashlib.sha256(repr((image.mode, image.size)).encode() + image.tobytes()).hexdigest()


def is_video(media: Any) -> bool:
    """True for a `Video`, for four-dimensional arrays and tensors, and for sequences of frames."""
    import torch

    if isinstance(media, torch.Tensor | np.ndarray):
        return media.ndim == 4
    return isinstance(media, Sequence) and not isinstance(media, str)


def frames_first(video: Any) -> Sequence[Any]:
    """The frames of a video in order, as views: a `Video`, a sequence of images, an array or tensor [T, ...], or the
    model's floats [C, T, H, W] with C of 1 or 3. Raises DataError for an array or tensor without four axes."""
    import torch

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
