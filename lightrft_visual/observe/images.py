"""Small files and thumbnails of images and videos."""

import base64
import hashlib
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..data.media import encoded, evenly_spaced, is_video, to_rgb, video_frames
from ..errors import DataError, writable
from ..runtime.files import write_atomic
from ..runtime.packages import needed

IMAGE_SIDE = 512  # pixels; longer sides are scaled down before an image of a rollout is stored
PNG_PIXELS = 128 * 128  # up to this size lossless PNG is small enough
STRIP_FRAMES = 8
STRIP_FRAME_WIDTH = 512  # pixels at most: a JPEG has no more than 65,500 in a line
PNG: dict[str, Any] = {"kind": "PNG", "optimize": True}


def fit(image: Image.Image, side: int) -> Image.Image:
    """Scaled down so that no side is longer than `side`; never up."""
    if max(image.size) <= side:
        return image
    scale = side / max(image.size)
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.LANCZOS)


def film_strip(frames: Sequence[Image.Image], count: int = STRIP_FRAMES, height: int = 128) -> Image.Image:
    """Evenly spaced frames side by side, the first and the last included.

    Args:
        frames: of a video, in order.
        count: frames that are shown at most.
        height: of the strip, in pixels; widths follow from the first frame's shape. Wide frames are less high.
    """
    if not frames:
        raise DataError("a video without frames")
    shown = evenly_spaced(frames, count)
    scale = min(height / frames[0].height, STRIP_FRAME_WIDTH / frames[0].width)
    width, height = max(1, round(frames[0].width * scale)), max(1, round(frames[0].height * scale))
    strip = Image.new("RGB", (len(shown) * (width + 2) - 2, height), "white")
    for column, frame in enumerate(shown):
        strip.paste(frame.resize((width, height), Image.LANCZOS), (column * (width + 2), 0))
    return strip


def save_image(folder: Path, image: Any) -> str:
    """Store a small copy under `folder`/images, named by content, and give its relative path.

    image: PIL, an array or a tensor, see `data.media.to_pil`. Raises DataError for anything else.
    """
    image = fit(to_rgb(image), IMAGE_SIDE)
    return _store(folder, image, lossless=image.width * image.height <= PNG_PIXELS)


def save_video(folder: Path, video: Any) -> str:
    """Store a strip of a video's frames like an image; video: see `data.media.frames_first`."""
    return _store(folder, film_strip(video_frames(video)), lossless=False)


def _store(folder: Path, image: Image.Image, lossless: bool) -> str:
    """Write the image under `folder`/images unless it is there; equal images share a file. Gives the relative path."""
    digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()[:20]
    target = folder / "images" / (digest + (".png" if lossless else ".jpg"))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name("." + target.name)
        partial.write_bytes(encoded(image, **PNG) if lossless else encoded(image, "JPEG", quality=85))
        partial.replace(target)
    return f"images/{target.name}"


def data_uri(image: Image.Image, side: int, quality: int = 72) -> str:
    """A thumbnail for the report: the smaller of PNG and JPEG.

    Args:
        image: in RGB.
        side: pixels of the longer side at most.
        quality: of the JPEG, 1 to 95.
    """
    image = fit(image, side)
    choices = [(encoded(image, "JPEG", quality=quality), "jpeg")]
    if image.width * image.height <= PNG_PIXELS:
        choices.append((encoded(image, **PNG), "png"))
    content, kind = min(choices, key=lambda choice: len(choice[0]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


SHEET = "contact_sheet.png"
SHEET_IMAGES = 48  # of an evaluation's sheet
MARGIN = 10
INK, FAINT, PAPER, FRAME = (24, 24, 27), (113, 113, 122), (255, 255, 255), (228, 228, 231)
TEXT_LINES = 2
FONT_SIZE = 12
STRIP = 6  # frames of a video's strip
SIDE = 224  # pixels of an image's cell; a video takes a wide cell with a strip of STRIP frames, half as high each
MAX_WIDTH = 1400  # pixels; wide cells stand in fewer columns


def score_text(record: Mapping[str, Any]) -> str:
    """Reward, gold and the reward's components in one short line, without those that did not apply; a sole component
    that is the reward itself is not said twice."""
    reward = record.get("reward")
    if not record.get("valid", True) or not isinstance(reward, int | float):
        return "no valid reward"
    applied = {name: value for name, value in (record.get("components") or {}).items() if value == value}
    gold = {"gold": applied.pop("gold")} if "gold" in applied else {}
    if [f"{value:.3f}" for value in applied.values()] == [f"{reward:.3f}"]:
        applied = {}
    parts = [f"{name} {value:.3g}" for name, value in (gold | applied).items()]
    return "  ".join([f"{reward:.3f}", *parts])


def wrap(text: str, font: ImageFont.FreeTypeFont, width: int, lines: int) -> list[str]:
    """Lines of a text for a drawing; an ellipsis marks what was left out.

    Args:
        text: of any length, with any breaks.
        font: that it is drawn in, whose "n" stands for the width of a letter.
        width: pixels that a line may take.
        lines: how many there are at most.
    """
    letters = max(4, int(width / max(1.0, font.getlength("n"))))
    text = " ".join(writable(text).split())
    return textwrap.wrap(text, letters, max_lines=lines, placeholder="…") or [""]


def enlarge(image: Image.Image, side: int) -> Image.Image:
    """Whole-number enlargement of small images, without blurring their pixels; large ones are scaled down."""
    factor = side // max(image.size)
    if factor < 2:
        return fit(image, side)
    return image.resize((image.width * factor, image.height * factor), Image.NEAREST)


def contact_sheet(records: Sequence[Mapping[str, Any]]) -> Image.Image:
    """A grid of the records' first image or video, each with its prompt and scores below; as many columns as suit the
    number and width of the cells.

    records: with `images` or `videos` as they were generated; those without are left out. Raises DataError without any
    image.
    """
    media = [(record, [*(record.get("images") or ()), *(record.get("videos") or ())]) for record in records]
    shown = [(record, own[0]) for record, own in media if own]
    if not shown:
        raise DataError("a contact sheet needs at least one image")
    tiles = [
        film_strip(video_frames(own), STRIP, SIDE // 2) if is_video(own) else enlarge(to_rgb(own), SIDE)
        for _, own in shown
    ]
    width, height = max(SIDE, *(tile.width for tile in tiles)), max(tile.height for tile in tiles)
    columns = max(1, min(len(shown), max(4, round(len(shown) ** 0.5)), MAX_WIDTH // width))
    line = FONT_SIZE + 4
    cell_width, cell_height = width + MARGIN, height + MARGIN + line * (TEXT_LINES + 1) + 8
    lines = -(-len(shown) // columns)
    sheet = Image.new("RGB", (columns * cell_width + MARGIN, lines * cell_height + MARGIN), PAPER)
    for index, ((record, _), tile) in enumerate(zip(shown, tiles)):
        corner = (MARGIN + index % columns * cell_width, MARGIN + index // columns * cell_height)
        _draw_cell(sheet, corner, (width, height), tile, record)
    return sheet


def _draw_cell(
    sheet: Image.Image, corner: tuple[int, int], size: tuple[int, int], tile: Image.Image, record: Mapping[str, Any]
) -> None:
    """One image in its frame, scores and prompt below it."""
    (left, top), (width, height) = corner, size
    draw, font, line = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE), FONT_SIZE + 4
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=FRAME)
    sheet.paste(tile, (left + (width - tile.width) // 2, top + (height - tile.height) // 2))
    below = top + height + 5
    draw.text((left, below), wrap(score_text(record), font, width, 1)[0], fill=INK, font=font)
    for number, text in enumerate(wrap(str(record.get("prompt", "")), font, width, TEXT_LINES), start=1):
        draw.text((left, below + number * line), text, fill=FAINT, font=font)


def write_mp4(path: Path, video: Any, fps: float | None = None) -> None:
    """An H.264 file that browsers play; odd sizes lose one row or column, as the format asks for even ones.

    Args:
        path: of the file, in a folder that exists.
        video: see `data.media.frames_first`.
        fps: frames per second; None: it is not known, and 8.
    """
    with needed("imageio"):
        import imageio.v2 as imageio

    frames = [np.asarray(frame)[: frame.height // 2 * 2, : frame.width // 2 * 2] for frame in video_frames(video)]
    if not frames or frames[0].size == 0:
        raise DataError("a video needs at least one frame of 2 x 2 pixels")
    partial = path.with_name(f".{path.stem}.partial.mp4")
    with imageio.get_writer(partial, fps=fps or 8, codec="libx264", macro_block_size=1, quality=7) as writer:
        for frame in frames:
            writer.append_data(frame)
    os.replace(partial, path)


def write_contact_sheet(folder: str | Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """contact_sheet.png in `folder`, and video_000.mp4 … for the records that are videos; gives the sheet's path.

    Args:
        folder: of one evaluation; made where it is missing.
        records: as of `contact_sheet`; `fps` of videos, where it is known.
    """
    folder = Path(folder)
    write_atomic(folder / SHEET, encoded(contact_sheet(records), **PNG))
    for index, record in enumerate(records):
        for video in record.get("videos") or []:
            write_mp4(folder / f"video_{index:03d}.mp4", video, record.get("fps"))
    return folder / SHEET
