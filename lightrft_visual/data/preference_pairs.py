"""Pairs of images with a prompt, of which one is preferred: what offline Diffusion-DPO trains on.

Two forms of rows are read: `prompt`, `chosen`, `rejected`; and that of Pick-a-Pic: `caption`, `jpg_0`, `jpg_1`,
`label_0` (1 where the first image is preferred, 0 where the second one is, 0.5 for a tie, which is no pair and counts
as a bad row). An image is a path, or bytes as parquet files hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.diffusion import DiffusionDataConfig
from ..errors import DataError
from .bounds import check_values
from .drawing_prompts import DrawPrompts
from .media import resolve_source
from .prompts import PromptRow
from .roots import located
from .sources import RowSource

PICK_A_PIC = ("jpg_0", "jpg_1")
PREFERENCE = "label_0"  # of Pick-a-Pic: how far its first image is preferred
CAPTION = "caption"


class PreferencePairs(DrawPrompts):
    """Rows whose two images are the chosen and the rejected one; read, checked and skipped as other rows are."""

    def __init__(self, spec: str, split: str, limit: int, config: DiffusionDataConfig):
        """spec, split, limit: as of PromptDataset. Raises DataError naming file and row for what cannot be used."""
        super().__init__(spec, split, limit, config, most_images=2)

    def __getitem__(self, index: int) -> PromptRow:
        """The row with its images decoded; rows stay in their file, as they may hold the images themselves."""
        source, row = self._rows[index]
        return self._decoded(self._parse(self._sources[source], row, index))

    def _parse(self, source: RowSource, row: int, index: int) -> PromptRow:
        root = located(self.config.image_root) if self.config.image_root else source.folder
        return replace(_pair(source[row], source.name(row), root, self.config), index=index)


def _pair(raw: Any, name: str, root: Any, config: DiffusionDataConfig) -> PromptRow:
    if not isinstance(raw, Mapping):
        raise DataError(f"{name}: a row must be a mapping of columns, not {type(raw).__name__}", "row form")
    check_values(raw)
    keys = _image_columns(raw, name, config)
    prompt = raw.get(config.input_key) or raw.get(CAPTION)
    if not isinstance(prompt, str) or not prompt.strip():
        columns = ", ".join(map(str, raw))
        raise DataError(f"{name}: no text in column {config.input_key!r}; the row has: {columns}", "prompt form")
    for key in keys:
        if raw.get(key) in (None, ""):
            columns = ", ".join(map(str, raw))
            raise DataError(f"{name}: no image in column {key!r}; the row has: {columns}", "media missing")
    return PromptRow(prompt=prompt, images=[resolve_source(raw[key], root) for key in keys], source=name)


def _image_columns(raw: Mapping[str, Any], name: str, config: DiffusionDataConfig) -> tuple[str, str]:
    """The columns of the chosen and of the rejected image. Raises DataError for a tie, or no preference."""
    if config.chosen_key in raw or PREFERENCE not in raw:
        return config.chosen_key, config.rejected_key
    try:
        first = float(raw[PREFERENCE])
    except (TypeError, ValueError):
        raise DataError(f"{name}: {PREFERENCE} is {raw[PREFERENCE]!r}, no number", "preference form") from None
    if first == 0.5:
        raise DataError(f"{name}: neither image is preferred ({PREFERENCE} is 0.5)", "tie")
    if first not in (0.0, 1.0):
        raise DataError(f"{name}: {PREFERENCE} is {first}; it must be 0, 0.5 or 1", "preference form")
    return PICK_A_PIC if first == 1 else PICK_A_PIC[::-1]
