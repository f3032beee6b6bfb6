"""Prompts of diffusion runs: rows of text, with a first frame for image-to-video models or with images for models that
edit; checked before any model loads."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config.diffusion import DiffusionDataConfig
from ..errors import DataError
from ..experience.rollouts import media_list
from .bad_rows import MAX_CAPTION, BadRow, check_reference, check_values, warn_once
from .forms import is_filled, json_list
from .media import is_path, resolve_source
from .prompts import PromptDataset, PromptRow, RowChecks, reference_in
from .rows import resolve_images, without_fraction
from .sources import RowSource

FIRST_FRAME = "input_image"  # where rewards find the first image in a row's metadata: its path, where it has one
USUAL_COLUMNS = ("images", "image")  # of images, where image_key names no other
ROLES = ("input_key", "label_key", "reference_key")


class DrawPrompts(PromptDataset):
    """Rows for models that draw, read, checked and skipped (on_bad_row) as those of models that see.

    Raises DataError naming file and row for a missing prompt, and for missing, broken or too many images when the model
    needs some.
    """

    def __init__(
        self, spec: str, split: str, limit: int, config: DiffusionDataConfig, most_images: int,
        labels: frozenset[str] | None = None,
    ):  # fmt: skip
        """spec, split, limit: as of PromptDataset. most_images: that the model takes of a row, which then has at least
        one; 0: text alone. labels: of RowChecks."""
        self.most_images = most_images
        # Pixels are read at the start: what a step draws with is chosen by row, so no row can be left out later.
        checks = RowChecks(decode=most_images > 0, labels=labels)
        super().__init__(spec, config, split=split, max_rows=limit, checks=checks)
        self.columns |= {FIRST_FRAME} if most_images else set()  # rewards find an image without a path itself

    @property
    def rows(self) -> Iterator[PromptRow]:
        """One after the other, their images not yet decoded: they stay in their files, which may hold images too."""
        return map(super().__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> PromptRow:
        """The row with its images decoded. Raises DataError naming it: its file may be another one by now."""
        source, row = self._rows[index]
        try:
            return self._decoded(super().__getitem__(index))
        except DataError as error:
            raise DataError(BadRow.of(error, self._sources[source].name(row)).message, error.cause) from error

    def _parse(self, source: RowSource, row: int, index: int) -> PromptRow:
        parsed = _parse(source[row], self._root(source), self.config, self.most_images)
        reference = reference_in(source, parsed.reference)
        return replace(parsed, source=source.name(row), index=index, reference=reference)

    @property
    def _reading(self) -> dict[str, Any]:
        return {}


def _parse(raw: Any, root: Any, config: DiffusionDataConfig, most_images: int) -> PromptRow:
    check_values(raw)
    for flag in ROLES[1:]:  # a column that a flag names must be there
        key = getattr(config, flag)
        if key not in raw and key != getattr(DiffusionDataConfig, flag):
            columns = ", ".join(map(str, raw))
            raise DataError(f"no column {key!r} ({flag}); the row has: {columns}", "column missing")
    check_reference(raw.get(config.reference_key))
    prompt = _text(raw.get(config.input_key), raw, config)
    if len(prompt) > MAX_CAPTION:
        raise DataError(f"the prompt has {len(prompt)} characters, above {MAX_CAPTION}", "prompt too long")
    column = image_column(raw, config.image_key)
    images = _images(raw, column, most_images, root) if most_images else []
    if not most_images and is_path(raw.get(config.image_key)):
        warn_once("column %r (image_key) is not read: the model draws from text alone", config.image_key)
    label = without_fraction(raw.get(config.label_key))
    # Rewards are given prompt, label and reference anyway; a column that a flag names stays under its own name too.
    read = {config.image_key} | ({column} if images else set())
    defaults = read | {getattr(DiffusionDataConfig, flag) for flag in ROLES}
    roles = read | {getattr(config, flag) for flag in ROLES}
    metadata = {key: value for key, value in raw.items() if key not in roles & defaults}
    if images and is_path(images[0]):
        metadata[FIRST_FRAME] = os.fspath(images[0])
    return PromptRow(
        prompt=prompt,
        images=images,
        label=str(label) if is_filled(label) else None,
        reference=raw.get(config.reference_key),
        metadata=resolve_images(metadata, root),
    )


def _text(prompt: Any, raw: Mapping[str, Any], config: DiffusionDataConfig) -> str:
    if not isinstance(prompt, str) or not prompt.strip():
        columns = ", ".join(map(str, raw))
        if [*raw] == ["text"]:  # a folder of text files is read so
            empty = "; a .txt file that is named itself, without --input_key, may have empty lines"
            columns += empty if config.input_key == "text" else "; give --input_key text"
        raise DataError(f"no text in column {config.input_key!r}; the row has: {columns}", "prompt form")
    return prompt


def image_column(raw: Mapping[str, Any], image_key: str) -> str:
    """The column that the flag names; where nobody has set it and it is empty, one under a usual name."""
    if image_key != DiffusionDataConfig.image_key or is_filled(raw.get(image_key)):
        return image_key
    return next((name for name in USUAL_COLUMNS if is_filled(raw.get(name))), image_key)


def _images(raw: Mapping[str, Any], column: str, most: int, root: Any) -> list[Any]:
    """The row's images, not yet decoded. Raises DataError for none and for more than the model takes."""
    found = media_list(json_list(raw.get(column)))
    if not found or not all(map(is_filled, found)):
        usual = () if column != DiffusionDataConfig.image_key else USUAL_COLUMNS
        where = " or ".join(repr(each) for each in (column, *usual))
        raise DataError(f"this model starts from an image, and column {where} has none", "media missing")
    if len(found) > most:
        raise DataError(f"{len(found)} images in column {column!r}; this model takes {most}", "media count")
    return [resolve_source(image, root) for image in found]


PICK_A_PIC = ("jpg_0", "jpg_1")
PREFERENCE = "label_0"  # of Pick-a-Pic: how far its first image is preferred
CAPTION = "caption"


class PreferencePairs(DrawPrompts):
    """Rows whose two images are the chosen and the rejected one; read, checked and skipped as other rows are."""

    def __init__(self, spec: str, split: str, limit: int, config: DiffusionDataConfig):
        """spec, split, limit: as of PromptDataset. Raises DataError naming file and row for what cannot be used."""
        super().__init__(spec, split, limit, config, most_images=2)

    def _parse(self, source: RowSource, row: int, index: int) -> PromptRow:
        return replace(_pair(source[row], self._root(source), self.config), source=source.name(row), index=index)


def _pair(raw: Any, root: Any, config: DiffusionDataConfig) -> PromptRow:
    check_values(raw)
    keys = _image_columns(raw, config)
    prompt = _text(raw.get(config.input_key) or raw.get(CAPTION), raw, config)
    for key in keys:
        if not is_filled(raw.get(key)):
            columns = ", ".join(map(str, raw))
            raise DataError(f"no image in column {key!r}; the row has: {columns}", "media missing")
    return PromptRow(prompt=prompt, images=[resolve_source(raw[key], root) for key in keys])


def _image_columns(raw: Mapping[str, Any], config: DiffusionDataConfig) -> tuple[str, str]:
    """The columns of the chosen and of the rejected image. Raises DataError for a tie, or no preference."""
    if config.chosen_key in raw or PREFERENCE not in raw:
        return config.chosen_key, config.rejected_key
    try:
        first = float(raw[PREFERENCE])
    except (TypeError, ValueError):
        raise DataError(f"{PREFERENCE} is {raw[PREFERENCE]!r}, no number", "preference form") from None
    if first == 0.5:
        raise DataError(f"neither image is preferred ({PREFERENCE} is 0.5)", "tie")
    if first not in (0.0, 1.0):
        raise DataError(f"{PREFERENCE} is {first}; it must be 0, 0.5 or 1", "preference form")
    return PICK_A_PIC if first == 1 else PICK_A_PIC[::-1]
