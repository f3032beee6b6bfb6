"""Prompts of diffusion runs: rows of text, for image-to-video with a first frame; checked before any model loads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from ...config.diffusion_schema import DiffusionDataConfig
from ...data.drawn_shapes import all_captions
from ...data.media import image_size, load_image, resolve_source
from ...data.sources import open_source
from ...errors import DataError

FIRST_FRAME = "input_image"  # where rewards find the first frame in a row's metadata: its path, where it has one
ROLES = ("input_key", "label_key", "reference_key")
EVAL_REPEATS = 4  # pictures drawn of each embedded caption in an evaluation


@dataclass
class DrawPrompt:
    """One prompt. images: the first frame's source where there is one; source: 'file:row' for messages."""

    prompt: str
    images: list[Any] = field(default_factory=list)
    label: str | None = None
    reference: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""


class DrawPrompts:
    """Rows of one file or data set folder (jsonl, json, csv, txt, parquet, Hugging Face).

    Raises DataError naming file and row for a missing prompt, and for a missing or broken first frame when the model
    needs one.
    """

    def __init__(self, path: str, split: str, limit: int, config: DiffusionDataConfig, first_frames: bool):
        source = open_source(path, split)
        root = config.image_root or source.folder
        self.rows = [
            _parse(source[i], source.name(i), root, config, first_frames) for i in range(min(limit, len(source)))
        ]
        if not self.rows:
            raise DataError(f"{path}: no rows")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> DrawPrompt:
        """The row with its first frame decoded."""
        row = self.rows[index]
        if not row.images or isinstance(row.images[0], Image.Image):
            return row
        return DrawPrompt(row.prompt, [load_image(row.images[0])], row.label, row.reference, row.metadata, row.source)


def _parse(raw: Any, name: str, root: Any, config: DiffusionDataConfig, first_frames: bool) -> DrawPrompt:
    if not isinstance(raw, Mapping):
        raise DataError(f"{name}: a row must be a mapping of columns, not {type(raw).__name__}")
    _check_columns(raw, name, config)
    prompt = raw.get(config.input_key)
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{name}: no text in column {config.input_key!r}; the row has: {', '.join(map(str, raw))}")
    images = []
    if first_frames:
        if raw.get(config.image_key) in (None, ""):
            raise DataError(f"{name}: an image-to-video model needs a first frame in column {config.image_key!r}")
        images = [resolve_source(raw[config.image_key], root)]
        try:
            image_size(images[0])
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    # Rewards are given prompt, label and reference anyway; a column that a flag names stays under its own name too.
    defaults = {config.image_key} | {getattr(DiffusionDataConfig, flag) for flag in ROLES}
    roles = {config.image_key} | {getattr(config, flag) for flag in ROLES}
    metadata = {key: value for key, value in raw.items() if key not in roles & defaults}
    if images and isinstance(images[0], str | os.PathLike) and Path(images[0]).is_file():
        metadata[FIRST_FRAME] = str(images[0])
    label = raw.get(config.label_key)
    return DrawPrompt(
        prompt,
        images,
        None if label is None else str(label),
        raw.get(config.reference_key),
        metadata,
        name,
    )


def _check_columns(raw: Mapping[str, Any], name: str, config: DiffusionDataConfig) -> None:
    """A column that a flag names must be there."""
    for flag in ROLES[1:]:
        key = getattr(config, flag)
        if key not in raw and key != getattr(DiffusionDataConfig, flag):
            raise DataError(f"{name}: no column {key!r} ({flag}); the row has: {', '.join(map(str, raw))}")


def embedded_prompts(root: Path) -> tuple[Path, Path]:
    """The embedded captions as jsonl files (train, test) below `root`: every colour with every shape."""
    folder = root / "data" / "drawn-shapes-v1"
    texts = [caption.text for caption in all_captions()]
    for name, prompts in (("train", texts), ("test", texts * EVAL_REPEATS)):
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
            os.replace(scratch, path)
    return folder / "train.jsonl", folder / "test.jsonl"
