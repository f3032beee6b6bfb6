"""Videos of data rows: decoded by PyAV, frames chosen and bounded by the rules of qwen-vl-utils.

A source of a video is a path, file:// or (with allow_remote) http(s) URL or bytes of an encoded video; a list of
images, which are its frames; a uint8 array [T, H, W, 3]; or a mapping {"video": source, **options} with the options of
qwen-vl-utils: fps (default 2) or nframes, min_frames, max_frames, max_pixels and resized_height with resized_width for
a frame; for frame lists sample_fps, the frames a second they were taken at.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils import smart_resize
from qwen_vl_utils.vision_process import smart_nframes

from ..errors import DataError, refused_as
from .media import (
    MAX_FRAMES,
    MAX_IMAGE_PIXELS,
    Video,
    check_aspect_ratio,
    describe_source,
    image_size,
    is_remote,
    load_image,
    read_source,
)

MAX_FRAME_PIXELS = 768 * 28 * 28
MAX_VIDEO_PIXELS = 128_000 * 28 * 28  # of all kept frames together: 300 MB
MAX_DECODED_FRAMES = 200_000  # about two hours at 25 frames a second
MAX_DECODED_PIXELS = 400_000_000_000  # about two hours of 1920x1080
MAX_LISTED_PIXELS = 4_000_000_000  # of all frames of a list before they shrink: each is an image file of its own
LISTED_FPS = 2.0  # frames a second at which a list of frames was taken, where sample_fps does not say
_MIN_SIDE = 28
# What each option may be: (whole number, smallest, largest). Checked before a frame is decoded.
_OPTIONS: dict[str, tuple[bool, float, float]] = {
    "fps": (False, 1e-3, 1000.0),
    "nframes": (True, 2, MAX_FRAMES),
    "min_frames": (True, 2, MAX_FRAMES),
    "max_frames": (True, 2, MAX_FRAMES),
    "max_pixels": (True, _MIN_SIDE**2, 50_000_000),
    "resized_height": (True, _MIN_SIDE, 8192),
    "resized_width": (True, _MIN_SIDE, 8192),
    "sample_fps": (False, 1e-3, 1000.0),
}
# Playlists and concatenations name further files and URLs; everything else is refused by not being listed.
_CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpeg", "mpegts", "gif", "flv", "ogg", "asf")


def load_video(source: Any, *, allow_remote: bool = False, max_pixels: int = MAX_IMAGE_PIXELS) -> Video:
    """Decode one video.

    Args:
        source: with its options, see the module.
        allow_remote: http(s) URLs are fetched; else they are refused.
        max_pixels: width times height above which a frame is refused, before decoding.

    Raises:
        DataError: naming the source, for what is missing, damaged, too long, too large, or has fewer than two frames.
    """
    if isinstance(source, Video):
        return source
    source, options = _split_options(source)
    name = f"<{len(source)} frames>" if isinstance(source, (list, tuple)) else describe_source(source)
    try:
        if isinstance(source, (np.ndarray, torch.Tensor)):
            return _from_list([Image.fromarray(frame) for frame in _frames_of(source)[: MAX_FRAMES + 1]], options)
        if _is_frame_list(source):
            return _from_list(source, options, allow_remote=allow_remote, max_pixels=max_pixels)
        content = read_source(source, allow_remote=allow_remote)
        return _decode(content, options, max_pixels)
    except ValueError as error:  # also DataError of a frame, which gains the video's name
        raise DataError(f"video {name}: {error}", getattr(error, "cause", None) or "video damaged") from error


def check_video(source: Any, *, allow_remote: bool = False, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """The cheap part of load_video, for validation at start: options, files, and the headers of listed frames.

    Args: as of `load_video`.
    """
    source, options = _split_options(source)
    if isinstance(source, Video):
        return
    if isinstance(source, (np.ndarray, torch.Tensor)):
        _frames_of(source)
    elif _is_frame_list(source):
        known = [frame for frame in source if not (allow_remote and is_remote(frame))]
        sizes = [image_size(frame, allow_remote=allow_remote, max_pixels=max_pixels) for frame in known]
        _check_frames(len(source), sizes, options)
    elif not (allow_remote and is_remote(source)):
        read_source(source, allow_remote=allow_remote)


def is_remote_video(source: Any) -> bool:
    """Whether reading this source would open a network connection."""
    source, _ = _split_options(source)
    return any(map(is_remote, source)) if _is_frame_list(source) else is_remote(source)


def _is_frame_list(source: Any) -> bool:
    return isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray, Video))


def _split_options(source: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(source, Mapping) and "video" in source:
        options = {key: value for key, value in source.items() if key not in ("video", "type") and value is not None}
        unknown = sorted(map(str, set(options) - set(_OPTIONS)))
        if unknown:
            known = ", ".join(_OPTIONS)
            raise DataError(f"unknown video option(s) {', '.join(unknown)}; known: {known}", "video options")
        if "fps" in options and "nframes" in options:
            raise DataError("video options fps and nframes exclude each other", "video options")
        if ("resized_height" in options) != ("resized_width" in options):
            raise DataError("video options resized_height and resized_width need each other", "video options")
        return source["video"], {key: _option(key, value) for key, value in options.items()}
    return source, {}


def _option(key: str, value: Any) -> float:
    """An option of a row as a number within its bounds. Whole numbers may come as 4.0, as JSON and Arrow write them."""
    whole, smallest, largest = _OPTIONS[key]
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and smallest <= value <= largest
    if not fits or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        shown = ascii(value)[:40]
        raise DataError(f"video option {key} is {shown}; it must be {kind} from {smallest:g} to {largest:g}",
                        "video options")  # fmt: skip
    return int(value) if whole else float(value)


def _check_frames(count: int, sizes: list[tuple[int, int]], options: Mapping[str, float]) -> None:
    """Bounds of a list of frames. sizes: (width, height) of those whose headers are at hand. Raises DataError."""
    if count == 0:
        raise DataError("a video without frames", "video options")
    if count > MAX_FRAMES:
        raise DataError(f"{count} frames are above the limit of {MAX_FRAMES}", "video too large")
    if len(set(sizes)) > 1:
        raise DataError("its frames differ in size", "video options")
    if sum(width * height for width, height in sizes) > MAX_LISTED_PIXELS:
        width, height = sizes[0]
        raise DataError(f"{count} frames of {width}x{height} pixels are too many; shrink them", "video too large")
    _frame_limit(len(_kept_of_list(count, options)), options)


def _kept_of_list(count: int, options: Mapping[str, float]) -> list[int]:
    """Numbers of the frames of a list that are kept: all of them, unless fps, nframes or max_frames ask for fewer."""
    rate = options.get("sample_fps", LISTED_FPS)
    asked = {name: value for name, value in options.items() if name != "nframes" or value < count}
    fewer = "nframes" in asked or asked.get("fps", rate) < rate or asked.get("max_frames", count) < count
    if count < 2 or not fewer:
        return list(range(count))
    with refused_as(DataError, f"{count} frames"):
        return _kept(asked if "nframes" in asked else {"fps": rate, **asked}, count, rate)


def _kept(options: Mapping[str, float], total: int, fps: float) -> list[int]:
    """Numbers of the frames that qwen-vl-utils keeps, ascending. Raises ValueError for options that cannot be met.

    Args:
        options: fps or nframes, min_frames, max_frames and others.
        total: frames of the video.
        fps: of the video.
    """
    sampling = {key: options[key] for key in ("fps", "nframes", "min_frames", "max_frames") if key in options}
    sampling.setdefault("max_frames", min(MAX_FRAMES, total))
    count = smart_nframes(sampling, total_frames=total, video_fps=fps)
    return torch.linspace(0, total - 1, count).round().long().tolist()


def _frames_of(array: np.ndarray | torch.Tensor) -> np.ndarray:
    """The same in NumPy. Raises DataError for what is no uint8 array [T, H, W, 3]."""
    kind, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
    if len(shape) != 4 or shape[-1] != 3 or kind != "uint8" or 0 in shape:
        raise DataError(f"expected a uint8 array [T, H, W, 3], got {kind} {shape}", "video options")
    with refused_as(DataError, "expected a uint8 array [T, H, W, 3]"):  # not on the host, or not dense
        return np.asarray(array)


def _from_list(source: Sequence[Any], options: dict[str, Any], **reading: Any) -> Video:
    """Frames from images. They are decoded and shrunk one by one, after all headers were looked at."""
    if len(source) <= MAX_FRAMES:
        # What lies elsewhere is fetched once, for its header and its pixels.
        allowed = reading.get("allow_remote", False)
        source = [read_source(frame, allow_remote=allowed) if is_remote(frame) else frame for frame in source]
    sizes = [image_size(frame, **reading) for frame in source[:MAX_FRAMES]]
    _check_frames(len(source), sizes, options)
    indices = _kept_of_list(len(source), options)
    limit, fps = _frame_limit(len(indices), options), options.get("sample_fps", LISTED_FPS)
    frames = [np.asarray(_bound_frame(load_image(source[i], **reading), options, limit)) for i in indices]
    return Video(np.stack(frames), _metadata(indices, len(source), fps, "frames"))


def _metadata(indices: list[int], total: int, fps: float, backend: str) -> dict[str, Any]:
    return {
        "fps": fps,
        "frames_indices": indices,
        "total_num_frames": total,
        "duration": total / fps,
        "video_backend": backend,
        "do_sample_frames": False,
    }


def _frame_limit(count: int, options: Mapping[str, Any]) -> int:
    """Pixels that each of `count` kept frames may have. Raises DataError for a chosen size that is too much."""
    limit = min(options.get("max_pixels", MAX_FRAME_PIXELS), MAX_VIDEO_PIXELS // count)
    if "resized_height" in options:
        height, width = options["resized_height"], options["resized_width"]
        check_aspect_ratio((width, height), "resized_height, resized_width: a frame")
        if width * height * count > MAX_VIDEO_PIXELS:
            raise DataError(
                f"{count} frames of resized_height {height} and resized_width {width} have more than "
                f"{MAX_VIDEO_PIXELS} pixels together",
                "video too large",
            )
    return limit


def _bound_frame(frame: Image.Image, options: Mapping[str, Any], limit: int) -> Image.Image:
    """Shrink a frame of more than `limit` pixels; the final size is the model's video processor's choice."""
    if "resized_height" in options:
        height, width = options["resized_height"], options["resized_width"]
    elif frame.width * frame.height > limit:
        height, width = smart_resize(frame.height, frame.width, factor=28, max_pixels=limit, min_pixels=28 * 28)
    else:
        return frame
    return frame.resize((width, height), Image.Resampling.BICUBIC)


def _decode(content: bytes | Path, options: dict[str, Any], max_pixels: int) -> Video:
    import av  # loads FFmpeg's libraries: only where a video is read

    handle = io.BytesIO(content) if isinstance(content, bytes) else str(content)
    try:
        # FFmpeg may open nothing but the file itself.
        with av.open(handle, options={"protocol_whitelist": "file"}) as container:
            return _decode_container(container, options, max_pixels)
    except av.error.FFmpegError as error:
        raise DataError(f"damaged, or no video: {error}") from error


def _decode_container(container: Any, options: dict[str, Any], max_pixels: int) -> Video:
    if not set(container.format.name.split(",")) & set(_CONTAINERS):
        raise DataError(f"container format {container.format.name} is not supported")
    if not container.streams.video:
        raise DataError("the file holds no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise DataError("its codec is not known")
    size, shown = stream.width * stream.height, f"{stream.width}x{stream.height}"
    if size < 1:
        raise DataError("its frames have no size")
    if size > max_pixels:
        raise DataError(f"frames of {shown} pixels are above max_image_pixels = {max_pixels}", "video too large")
    check_aspect_ratio((stream.width, stream.height), "a frame")
    total, fps = _count_frames(container, stream), float(stream.average_rate or 0)
    if fps <= 0:
        raise DataError("its frame rate is unknown")
    if total < 2:
        raise DataError(f"it has {total} frames; two are the fewest")
    if total > MAX_DECODED_FRAMES:
        raise DataError(f"{total} frames are above the limit of {MAX_DECODED_FRAMES}", "video too large")
    if total * size > MAX_DECODED_PIXELS:
        raise DataError(f"{total} frames of {shown} pixels are too much to decode", "video too large")
    indices = _kept(options, total, fps)
    limit = _frame_limit(len(indices), options)

    def kept(frame: Any) -> np.ndarray:
        if frame.width * frame.height > max_pixels:  # whatever the header says
            raise DataError(f"a frame of {frame.width}x{frame.height} pixels, unlike its header", "video too large")
        image = frame.to_image()
        if frame.rotation:  # of a telephone that was held upright, as players show it
            image = image.rotate(frame.rotation, expand=True)
        return np.asarray(_bound_frame(image, options, limit))

    frames, decoded = _pick_frames(container, stream, indices, kept)
    if 1 < decoded < total and stream.frames == 0:  # some packets hold no frame to be shown
        container.seek(0)
        total, indices = decoded, _kept(options, decoded, fps)
        frames, decoded = _pick_frames(container, stream, indices, kept)
    if len(frames) < len(indices):
        raise DataError(f"it ends before frame {indices[len(frames)]}, which its header promises")
    return Video(np.stack(frames), _metadata(indices, total, fps, "pyav"))


def _count_frames(container: Any, stream: Any) -> int:
    """Frames by the header, without those that an edit cuts off, or by counting packets, which reads the file but
    decodes nothing."""
    if stream.frames > 0:
        shown = "mov" in container.format.name and sum(not entry.is_discard for entry in stream.index_entries)
        return shown or stream.frames
    packets = sum(1 for packet in container.demux(stream) if packet.size > 0)
    container.seek(0)
    return packets


def _pick_frames(
    container: Any, stream: Any, indices: list[int], kept: Callable[[Any], np.ndarray]
) -> tuple[list[np.ndarray], int]:
    """Decode in order, keeping the frames at `indices` (ascending, possibly repeated), up to the last one or to the
    end. How many were decoded, too."""
    frames: list[np.ndarray] = []
    decoded = 0
    for decoded, frame in enumerate(container.decode(stream), start=1):
        while len(frames) < len(indices) and indices[len(frames)] < decoded:
            frames.append(kept(frame))
        if len(frames) == len(indices):
            break
    return frames, decoded
