"""Prompts of diffusion runs: rows of text, for image-to-video with a first frame; checked before any model loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..config.diffusion import DiffusionDataConfig
from ..errors import DataError
from .bounds import check_reference, check_values
from .media import image_size, is_path, resolve_source
from .prompts import PromptDataset, PromptRow, RowChecks
from .roots import located
from .sources import RowSource

FIRST_FRAME = "input_image"  # where rewards find the first frame in a row's metadata: its path, where it has one
ROLES = ("input_key", "label_key", "reference_key")


class DrawPrompts(PromptDataset):
    """Rows for models that draw, read, checked and skipped (on_bad_row) as those of models that see.

    Raises DataError naming file and row for a missing prompt, and for a missing or broken first frame when the model
    needs one. The first frame is the row's one image.
    """

    def __init__(
        self, spec: str, split: str, limit: int, config: DiffusionDataConfig, first_frames: bool,
        labels: frozenset[str] | None = None,
    ):  # fmt: skip
        """spec, split, limit: as of PromptDataset. first_frames: whether the model starts from one. labels: of
        RowChecks."""
        self.first_frames = first_frames
        # Pixels are read at the start: what a step draws with is chosen by row, so no row can be left out later.
        super().__init__(
            spec, config, split=split, max_rows=limit, checks=RowChecks(decode=first_frames, labels=labels)
        )

    @cached_property
    def rows(self) -> list[PromptRow]:
        """All rows, their first frames not yet decoded."""
        return [super(DrawPrompts, self).__getitem__(index) for index in range(len(self))]

    def __getitem__(self, index: int) -> PromptRow:
        """The row with its first frame decoded."""
        row = self.rows[index]
        return self._decoded(row)

    def _parse(self, source: RowSource, row: int, index: int) -> PromptRow:
        root = located(self.config.image_root) if self.config.image_root else source.folder
        parsed = _parse(source[row], source.name(row), root, self.config, self.first_frames)
        return replace(parsed, index=index)

    @property
    def _reading(self) -> dict[str, Any]:
        return {}

    def _header(self, image: Any) -> tuple[int, int]:
        return image_size(image)


def _parse(raw: Any, name: str, root: Any, config: DiffusionDataConfig, first_frames: bool) -> PromptRow:
    if not isinstance(raw, Mapping):
        raise DataError(f"{name}: a row must be a mapping of columns, not {type(raw).__name__}", "row form")
    check_values(raw)
    _check_columns(raw, name, config)
    check_reference(raw.get(config.reference_key))
    prompt = raw.get(config.input_key)
    if not isinstance(prompt, str) or not prompt.strip():
        columns = ", ".join(map(str, raw))
        raise DataError(f"{name}: no text in column {config.input_key!r}; the row has: {columns}", "prompt form")
    images = []
    if first_frames:
        if raw.get(config.image_key) in (None, ""):
            text = f"{name}: an image-to-video model needs a first frame in column {config.image_key!r}"
            raise DataError(text, "media missing")
        images = [resolve_source(raw[config.image_key], root)]
    # Rewards are given prompt, label and reference anyway; a column that a flag names stays under its own name too.
    defaults = {config.image_key} | {getattr(DiffusionDataConfig, flag) for flag in ROLES}
    roles = {config.image_key} | {getattr(config, flag) for flag in ROLES}
    metadata = {key: value for key, value in raw.items() if key not in roles & defaults}
    if images and is_path(images[0]):
        metadata[FIRST_FRAME] = os.fspath(images[0])
    label = raw.get(config.label_key)
    return PromptRow(
        prompt=prompt,
        images=images,
        label=None if label is None else str(label),
        reference=raw.get(config.reference_key),
        metadata=metadata,
        source=name,
    )


def _check_columns(raw: Mapping[str, Any], name: str, config: DiffusionDataConfig) -> None:
    """A column that a flag names must be there."""
    for flag in ROLES[1:]:
        key = getattr(config, flag)
        if key not in raw and key != getattr(DiffusionDataConfig, flag):
            columns = ", ".join(map(str, raw))
            raise DataError(f"{name}: no column {key!r} ({flag}); the row has: {columns}", "column missing")
