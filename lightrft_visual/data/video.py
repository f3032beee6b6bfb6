"""Videos of data rows: decoded by PyAV, frames chosen and bounded by the rules of qwen-vl-utils.

A source of a video is a path, file:// or (with allow_remote) http(s) URL or bytes of an encoded video; a list of
images, which are its frames; a uint8 array [T, H, W, 3]; or a mapping {"video": source, **options} with the options of
qwen-vl-utils: fps (default 2) or nframes, min_frames, max_frames, max_pixels and resized_height with resized_width for
a frame; for frame lists sample_fps, the frames a second they were taken at.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils import smart_resize
from qwen_vl_utils.vision_process import smart_nframes

from ..errors import DataError
from .media import describe_source, is_remote, load_image, read_source

MAX_FRAMES = 768
MAX_FRAME_PIXELS = 768 * 28 * 28
MAX_DECODED_FRAMES = 200_000  # about two hours at 25 frames a second
_OPTIONS = (
    "fps", "nframes", "min_frames", "max_frames", "max_pixels", "resized_height", "resized_width", "sample_fps",
)  # fmt: skip
# Playlists and concatenations name further files and URLs; everything else is refused by not being listed.
_CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpeg", "mpegts", "gif", "flv", "ogg", "asf", "h264", "hevc")


class Video(NamedTuple):
    """Frames of one video and when they were taken; the pair is what vLLM takes as one item of multi_modal_data.

    frames: uint8 array [T, H, W, 3]. metadata: fps of the original, frames_indices in it, total_num_frames, duration
    in seconds, video_backend, and do_sample_frames = False: the frames are already chosen.
    """

    frames: np.ndarray
    metadata: dict[str, Any]


def load_video(
    source: Any, *, root: str | os.PathLike | None = None, allow_remote: bool = False, max_pixels: int = 50_000_000
) -> Video:
    """Decode one video. max_pixels bounds a frame before decoding; see the module for sources and options.

    Raises DataError naming the source for what is missing, damaged, too long, too large, or has fewer than two frames.
    """
    if isinstance(source, Video):
        return source
    source, options = _split_options(source)
    name = _describe_video(source)
    try:
        if isinstance(source, (np.ndarray, torch.Tensor)):
            return _from_array(source, options, name)
        if isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray)):
            frames = [load_image(f, root=root, allow_remote=allow_remote, max_pixels=max_pixels) for f in source]
            return _from_frames(frames, options, name)
        content = read_source(source, root=root, allow_remote=allow_remote)
        return _decode(content, options, name, max_pixels)
    except ValueError as error:  # also DataError of a frame, which gains the video's name
        raise DataError(f"video {name}: {error}") from error


def check_video(source: Any, *, root: str | os.PathLike | None = None, allow_remote: bool = False) -> None:
    """The cheap part of load_video, for validation at start: files exist, frame lists are not empty."""
    source, _ = _split_options(source)
    if isinstance(source, (Video, np.ndarray, torch.Tensor)):
        return
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes, bytearray)):
        if not source:
            raise DataError("a video without frames")
        for frame in source:
            if not isinstance(frame, Image.Image) and not (allow_remote and is_remote(frame)):
                read_source(frame, root=root, allow_remote=allow_remote)
    elif not (allow_remote and is_remote(source)):
        read_source(source, root=root, allow_remote=allow_remote)


def _describe_video(source: Any) -> str:
    if isinstance(source, (list, tuple)):
        return f"<{len(source)} frames>"
    return describe_source(source)


def _split_options(source: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(source, Mapping) and "video" in source:
        options = {key: value for key, value in source.items() if key not in ("video", "type") and value is not None}
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise DataError(f"unknown video option(s) {', '.join(unknown)}; known: {', '.join(_OPTIONS)}")
        return source["video"], options
    return source, {}


def _from_array(array: np.ndarray | torch.Tensor, options: dict[str, Any], name: str) -> Video:
    frames = np.asarray(array)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or frames.shape[0] < 1:
        raise DataError(f"expected a uint8 array [T, H, W, 3], got {frames.dtype} {frames.shape}")
    return _from_frames([Image.fromarray(frame) for frame in frames], options, name)


def _from_frames(frames: list[Image.Image], options: dict[str, Any], name: str) -> Video:
    if not frames:
        raise DataError("a video without frames")
    if len({frame.size for frame in frames}) > 1:
        raise DataError("its frames differ in size")
    if len(frames) > MAX_FRAMES:
        raise DataError(f"{len(frames)} frames are above the limit of {MAX_FRAMES}")
    fps = float(options.get("sample_fps", 2.0))
    pixels = np.stack([np.asarray(_bound_frame(frame, options)) for frame in frames])
    return Video(pixels, _metadata(list(range(len(frames))), len(frames), fps, "frames"))


def _metadata(indices: list[int], total: int, fps: float, backend: str) -> dict[str, Any]:
    return {
        "fps": fps,
        "frames_indices": indices,
        "total_num_frames": total,
        "duration": total / fps,
        "video_backend": backend,
        "do_sample_frames": False,
    }


def _bound_frame(frame: Image.Image, options: dict[str, Any]) -> Image.Image:
    """Shrink a frame above the limit; the final size is the model's video processor's choice."""
    limit = int(options.get("max_pixels", MAX_FRAME_PIXELS))
    if "resized_height" in options and "resized_width" in options:
        height, width = int(options["resized_height"]), int(options["resized_width"])
    elif frame.width * frame.height > limit:
        height, width = smart_resize(frame.height, frame.width, factor=28, max_pixels=limit, min_pixels=28 * 28)
    else:
        return frame
    return frame.resize((width, height), Image.Resampling.BICUBIC)


def _decode(content: bytes | Path, options: dict[str, Any], name: str, max_pixels: int) -> Video:
    import av  # loads FFmpeg's libraries: only where a video is read

    handle = io.BytesIO(content) if isinstance(content, bytes) else str(content)
    try:
        # FFmpeg may open nothing but the file itself.
        with av.open(handle, options={"protocol_whitelist": "file"}) as container:
            return _decode_container(container, options, name, max_pixels)
    except av.error.FFmpegError as error:
        raise DataError(f"damaged, or no video: {error}") from error


def _decode_container(container: Any, options: dict[str, Any], name: str, max_pixels: int) -> Video:
    if not set(container.format.name.split(",")) & set(_CONTAINERS):
        raise DataError(f"container format {container.format.name} is not supported")
    if not container.streams.video:
        raise DataError("the file holds no video stream")
    stream = container.streams.video[0]
    if stream.width * stream.height > max_pixels:
        raise DataError(f"frames of {stream.width}x{stream.height} pixels are above max_image_pixels = {max_pixels}")
    total, fps = _count_frames(container, stream), float(stream.average_rate or 0)
    if fps <= 0:
        raise DataError("its frame rate is unknown")
    if total > MAX_DECODED_FRAMES:
        raise DataError(f"{total} frames are above the limit of {MAX_DECODED_FRAMES}")
    sampling = {key: options[key] for key in ("fps", "nframes", "min_frames", "max_frames") if key in options}
    sampling.setdefault("max_frames", min(MAX_FRAMES, total))
    count = smart_nframes(sampling, total_frames=total, video_fps=fps)
    indices = torch.linspace(0, total - 1, count).round().long().tolist()
    frames = _pick_frames(container, stream, indices, options)
    return Video(np.stack(frames), _metadata(indices, total, fps, "pyav"))


def _count_frames(container: Any, stream: Any) -> int:
    """Frames by the header, or by counting packets, which reads the file but decodes nothing."""
    if stream.frames > 0:
        return stream.frames
    packets = sum(1 for packet in container.demux(stream) if packet.size > 0)
    container.seek(0)
    return packets


def _pick_frames(container: Any, stream: Any, indices: list[int], options: dict[str, Any]) -> list[np.ndarray]:
    """Decode in order, keeping the frames at `indices` (ascending, possibly repeated)."""
    frames: list[np.ndarray] = []
    for place, frame in enumerate(container.decode(stream)):
        while len(frames) < len(indices) and indices[len(frames)] == place:
            frames.append(np.asarray(_bound_frame(frame.to_image(), options)))
        if len(frames) == len(indices):
            return frames
    raise DataError(f"it ends before frame {indices[len(frames)]}, which its header promises")
