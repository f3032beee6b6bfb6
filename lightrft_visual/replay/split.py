"""Fields of a batch to single samples: one small function per `Kind`, the inverse of `replay_make`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..batches.experience import BatchLayout
from ..batches.fields import FieldSpec, Kind, tensors_equal
from ..batches.ragged import gather_rows
from ..errors import DataError
from .info import split_info

T = torch.Tensor
Span = tuple[int, int]


@dataclass
class _Frame:
    """One batch to be split: its form, and where each sample's tokens and actions are."""

    batch: Any
    layout: BatchLayout
    size: int
    seq_lens: list[int] | None = None  # packed form only
    num_actions: list[int] | None = None  # packed form only

    @property
    def packed(self) -> bool:
        return self.seq_lens is not None

    def token_spans(self, width: int) -> list[Span]:
        return self.layout.spans or [(0, width)] * self.size

    def action_spans(self, width: int) -> list[Span]:
        if self.layout.spans is None:
            return [(0, width)] * self.size
        offset = self.layout.prompt_width
        return [(max(start - offset, 0), max(stop - offset, 0)) for start, stop in self.layout.spans]


def split_fields(batch: Any, specs: dict[str, FieldSpec], layout: BatchLayout) -> dict[str, list]:
    """{field: its value for each sample}; None where the batch or, by `layout`, the sample lacks the field."""
    frame = _frame(batch, specs, layout)
    columns: dict[str, list] = {}
    for name, spec in specs.items():
        value = getattr(batch, name)
        column = [None] * frame.size if value is None else _SPLITTERS[spec.kind](value, name, spec, frame)
        if len(column) != frame.size:
            raise DataError(f"{name} holds {len(column)} samples, the batch has {frame.size}")
        columns[name] = _without_absent(column, spec, layout.absent.get(name))
    return columns


def _frame(batch: Any, specs: dict[str, FieldSpec], layout: BatchLayout) -> _Frame:
    if "sequences" not in specs or not batch.is_packed:
        return _Frame(batch, layout, batch.batch_size)
    if batch.num_actions is None or len(batch.num_actions) != len(batch.packed_seq_lens):
        raise DataError("a packed batch needs num_actions for each of its samples")
    return _Frame(batch, layout, batch.batch_size, list(batch.packed_seq_lens), list(batch.num_actions))


def _without_absent(column: list, spec: FieldSpec, absent: list[int] | None) -> list:
    if not absent:
        return column
    column = list(column)
    for index in absent:
        if spec.kind is not Kind.INFO or not column[index]:  # an info dict that was filled since is kept
            column[index] = None
    return column


def _cut(flat: T, sizes: list[int], name: str) -> list[T]:
    """Copies of consecutive rows: an item that held a view would keep the whole batch in memory."""
    if len(flat) != sum(sizes):
        raise DataError(f"{name} has {len(flat)} rows, its samples own {sum(sizes)}")
    return [part.clone() for part in flat.split(sizes)]


def _cut_padded(value: T, spans: list[Span], name: str) -> list[T]:
    if len(value) != len(spans) or max((stop for _, stop in spans), default=0) > value.shape[1]:
        raise DataError(
            f"{name} of shape {tuple(value.shape)} does not hold {len(spans)} samples in columns {spans[:4]}"
        )
    return _cut(gather_rows(value, spans), [stop - start for start, stop in spans], name)


def _split_tokens(value: T, name: str, spec: FieldSpec, frame: _Frame) -> list[T]:
    if not frame.packed:
        return _cut_padded(value, frame.token_spans(_width(value, name)), name)
    if spec.segments:
        value = (value != 0).to(frame.layout.mask_dtype)
    return _cut(value.reshape(-1), frame.seq_lens, name)


def _split_actions(value: T, name: str, spec: FieldSpec, frame: _Frame) -> list[T]:
    if frame.packed:
        return _cut(value.reshape(-1), frame.num_actions, name)
    return _cut_padded(value, frame.action_spans(_width(value, name)), name)


def _width(value: T, name: str) -> int:
    if value.dim() < 2:
        raise DataError(f"{name} has shape {tuple(value.shape)}; a padded batch holds one row a sample")
    return value.shape[1]


def _split_numbers(value: T, name: str, spec: FieldSpec, frame: _Frame) -> list[T]:
    single = frame.layout.single.get(name, [])
    if _one_per_sample(value, bool(single), frame):
        return _cut(value.reshape(-1), [1] * frame.size, name)
    parts = _split_actions(value, name, spec, frame)
    for index in single:
        part = parts[index]
        # Someone may have written one number per action since; those must not be lost.
        if tensors_equal(part[:1].expand_as(part), part):
            parts[index] = part[:1].clone()
    return parts


def _one_per_sample(value: T, single: bool, frame: _Frame) -> bool:
    if frame.packed:
        return value.numel() == frame.size != sum(frame.num_actions)
    if value.shape != (frame.size, 1):
        return False
    return single or max((stop for _, stop in frame.action_spans(1)), default=1) != 1


def _split_sample(value: T, name: str, spec: FieldSpec, frame: _Frame) -> list[T]:
    return [row.clone() for row in value.unbind()]


def _split_samples(value: dict[str, T], name: str, spec: FieldSpec, frame: _Frame) -> list[dict[str, T]]:
    rows = {key: [row.clone() for row in each.unbind()] for key, each in value.items()}
    if any(len(each) != frame.size for each in rows.values()):
        raise DataError(f"{name} does not hold {frame.size} samples under each key")
    return [{key: each[index] for key, each in rows.items()} for index in range(frame.size)]


def _counts(spec: FieldSpec, rows: int, name: str, frame: _Frame) -> list[int]:
    """Images (or videos) of each sample."""
    counts = getattr(frame.batch, spec.counts)
    if counts is not None:
        return counts.tolist()
    if rows == 0:
        return [0] * frame.size
    if rows == frame.size:
        return [1] * frame.size
    raise DataError(f"{name}: {rows} rows for {frame.size} samples, and no {spec.counts} to say whose they are")


def _split_grids(value: T, name: str, spec: FieldSpec, frame: _Frame) -> list[T]:
    return _cut(value, _counts(spec, len(value), name, frame), name)


def _split_patches(value: T, name: str, spec: FieldSpec, frame: _Frame) -> list[T]:
    grids = getattr(frame.batch, spec.grids)
    if grids is None:
        return _cut(value, _counts(spec, len(value), name, frame), name)
    counts = _counts(spec, len(grids), spec.grids, frame)
    if len(grids) != sum(counts):
        raise DataError(f"{spec.grids} has {len(grids)} rows, its samples own {sum(counts)}")
    patches = grids.prod(-1).tolist()
    ends = torch.tensor([0, *patches]).cumsum(0)
    bounds = ends[torch.tensor([0, *counts]).cumsum(0)]
    return _cut(value, bounds.diff().tolist(), name)


def _split_objects(value: list, name: str, spec: FieldSpec, frame: _Frame) -> list:
    return list(value)


def _split_info(value: dict, name: str, spec: FieldSpec, frame: _Frame) -> list[dict]:
    return split_info(value, frame.size, frame.layout.info)


_SPLITTERS: dict[Kind, Callable[[Any, str, FieldSpec, _Frame], list]] = {
    Kind.TOKENS: _split_tokens,
    Kind.ACTIONS: _split_actions,
    Kind.NUMBERS: _split_numbers,
    Kind.SAMPLE: _split_sample,
    Kind.SAMPLES: _split_samples,
    Kind.COUNTS: _split_sample,
    Kind.GRIDS: _split_grids,
    Kind.GRID_VALUES: _split_grids,
    Kind.PATCHES: _split_patches,
    Kind.OBJECTS: _split_objects,
    Kind.INFO: _split_info,
}
