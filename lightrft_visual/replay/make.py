"""Single samples to the fields of a batch: one small function per `Kind`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batches.experience import BatchLayout
from ..batches.fields import FieldSpec, Kind, replay_fields
from ..batches.ragged import scatter_rows
from ..errors import DataError
from .info import batch_info

T = torch.Tensor
Column = list[Any]  # one field's values, one per sample, None where the sample lacks it


@dataclass
class _Frame:
    """What all fields of one batch share. lengths: S of each sample; actions: A of each; spans: token columns and
    action columns of each sample in padded form."""

    items: Sequence[Any]
    packed: bool
    layout: BatchLayout
    lengths: list[int]
    actions: list[int]

    @property
    def padded_width(self) -> int:
        return self.layout.prompt_width + self.action_width

    @property
    def action_width(self) -> int:
        return max(self.actions)

    @property
    def action_spans(self) -> list[tuple[int, int]]:
        return [(0, count) for count in self.actions]


def make_fields(items: Sequence[Any], packed: bool, layout: BatchLayout) -> dict[str, Any]:
    """The batch's value of every field of the items' class; `layout` takes down what the values cannot show."""
    specs = replay_fields(type(items[0]))
    frame = _Frame(items, packed, layout, [], [])
    if "sequences" in specs:
        frame.lengths, frame.actions = packed_lengths(items)
        _place(frame)
    batch = {}
    for name, spec in specs.items():
        column = [getattr(item, name) for item in items]
        batch[name] = _MAKERS[spec.kind](column, name, spec, frame)
        absent = [index for index, value in enumerate(column) if value is None]
        if absent and batch[name] is not None:
            layout.absent[name] = absent
    return batch


def packed_lengths(items: Sequence[Any]) -> tuple[list[int], list[int]]:
    """S and A of each text or vision-language item. Raises DataError when its fields contradict each other."""
    specs = replay_fields(type(items[0]))
    action_names = [name for name, spec in specs.items() if spec.kind is Kind.ACTIONS]
    number_names = [name for name, spec in specs.items() if spec.kind is Kind.NUMBERS]
    lengths, actions = [], []
    for index, item in enumerate(items):
        if item.sequences is None or item.sequences.dim() != 1:
            raise DataError(f"sample {index}: sequences must be a tensor (S)")
        lengths.append(len(item.sequences))
        actions.append(_count_actions(item, index, action_names, number_names))
    return lengths, actions


def _count_actions(item: Any, index: int, action_names: list[str], number_names: list[str]) -> int:
    named = {name: getattr(item, name) for name in action_names}
    sizes = {name: len(value) for name, value in named.items() if value is not None}
    if len(set(sizes.values())) > 1:
        raise DataError(f"sample {index}: per-action fields of different lengths: {sizes}")
    if not sizes:
        numbers = [getattr(item, name) for name in number_names]
        sizes = {"values": max((len(value) for value in numbers if value is not None), default=0)}
    (count,) = set(sizes.values())
    if count > len(item.sequences):
        raise DataError(f"sample {index}: {count} actions, but only {len(item.sequences)} tokens")
    return count


def _place(frame: _Frame) -> None:
    """Prompts end where the actions begin, in every row."""
    prompts = [length - count for length, count in zip(frame.lengths, frame.actions)]
    frame.layout.prompt_width = max(prompts)
    if not frame.packed:
        width = frame.layout.prompt_width
        frame.layout.spans = [(width - prompt, width + count) for prompt, count in zip(prompts, frame.actions)]


def _flat(column: Column, name: str, spec: FieldSpec, sizes: list[int]) -> T | None:
    """All samples' values behind each other, `spec.fill` where a sample lacks them; None if all do."""
    present = [value for value in column if value is not None]
    if not present:
        return None
    like = present[0]
    filled = [like.new_full((size,), spec.fill) if value is None else value for value, size in zip(column, sizes)]
    for index, (value, size) in enumerate(zip(filled, sizes)):
        if value.shape != (size,) or value.dtype != like.dtype:
            raise DataError(
                f"sample {index}: {name} is {value.dtype} {tuple(value.shape)}, expected {like.dtype} ({size},)"
            )
    return torch.cat(filled)


def _full(spec: FieldSpec, sizes: list[int], frame: _Frame) -> T:
    """A mask of ones, for samples of which none has one."""
    device = frame.items[0].sequences.device
    return torch.ones(sum(sizes), dtype=spec.mask_dtype, device=device)


def _make_tokens(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    flat = _flat(column, name, spec, frame.lengths)
    if frame.packed:
        return _segments(flat, spec, frame) if spec.segments else flat.unsqueeze(0)
    if flat is None and spec.mask_dtype is not None and _uneven(frame.layout.spans):
        flat = _full(spec, frame.lengths, frame)
    return None if flat is None else scatter_rows(flat, frame.layout.spans, frame.padded_width)


def _segments(flat: T | None, spec: FieldSpec, frame: _Frame) -> T:
    """(1, total) long: sample index + 1 on real tokens, 0 on masked ones."""
    flat = _full(spec, frame.lengths, frame) if flat is None else flat
    frame.layout.mask_dtype = flat.dtype
    lengths = torch.tensor(frame.lengths, device=flat.device)
    index = torch.arange(1, len(lengths) + 1, device=flat.device).repeat_interleave(lengths)
    return (index * (flat != 0)).unsqueeze(0)


def _uneven(spans: list[tuple[int, int]]) -> bool:
    return len(set(spans)) > 1


def _make_actions(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    flat = _flat(column, name, spec, frame.actions)
    if flat is None and spec.mask_dtype is not None and not frame.packed and len(set(frame.actions)) > 1:
        flat = _full(spec, frame.actions, frame)
    if flat is None:
        return None
    return flat.unsqueeze(0) if frame.packed else scatter_rows(flat, frame.action_spans, frame.action_width)


def _make_numbers(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    """One number per sample for all samples: (B, 1) when padded. Otherwise a single number stands for each action."""
    single = [
        index
        for index, (value, count) in enumerate(zip(column, frame.actions))
        if value is not None and value.shape == (1,) and count != 1
    ]
    if not single:
        return _make_actions(column, name, spec, frame)
    frame.layout.single[name] = single
    if not frame.packed and all(value is None or value.shape == (1,) for value in column):
        return _flat(column, name, spec, [1] * len(column)).unsqueeze(1)
    column = list(column)
    for index in single:
        if not frame.actions[index]:
            raise DataError(f"sample {index}: {name} holds a number, but the sample has no action")
        column[index] = column[index].expand(frame.actions[index])
    return _make_actions(column, name, spec, frame)


def _make_sample(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    present = [value for value in column if value is not None]
    if not present:
        return None
    like = present[0]
    for index, value in enumerate(column):
        if value is not None and (value.shape != like.shape or value.dtype != like.dtype):
            raise DataError(
                f"sample {index}: {name} is {value.dtype} {tuple(value.shape)}, where others of its batch are "
                f"{like.dtype} {tuple(like.shape)}"
            )
    return torch.stack([torch.full_like(like, spec.fill) if value is None else value for value in column])


def _make_samples(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> dict[str, T] | None:
    present = [value for value in column if value is not None]
    if not present:
        return None
    keys = present[0].keys()
    for index, value in enumerate(column):
        if value is not None and value.keys() != keys:
            raise DataError(
                f"sample {index}: {name} has {sorted(value)}, where others of its batch have {sorted(keys)}"
            )
    return {
        key: _make_sample([value and value[key] for value in column], f"{name}[{key}]", spec, frame) for key in keys
    }


def _make_counts(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    """(B) long, counted where samples do not say; None if there is nothing to count."""
    owned = [_rows(item, spec) for item in frame.items]
    for index, (value, count) in enumerate(zip(column, owned)):
        if value is not None and int(value) != count:
            raise DataError(f"sample {index}: {name} is {int(value)}, but its {spec.grids} hold {count}")
    if not any(owned) and all(value is None for value in column):
        return None
    like = next((value for value in column if value is not None), torch.zeros((), dtype=torch.long))
    return _make_sample([torch.full_like(like, count) for count in owned], name, spec, frame)


def _rows(item: Any, spec: FieldSpec) -> int:
    """Images (or videos) of a sample: rows of its grids, or of its pixel values where the model has no grids."""
    grids, patches = getattr(item, spec.grids), getattr(item, spec.patches)
    owner = patches if grids is None else grids
    return 0 if owner is None else len(owner)


def _make_rows(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    present = [value for value in column if value is not None]
    if not present:
        return None
    for index, value in enumerate(column):
        if value is not None and (value.shape[1:] != present[0].shape[1:] or value.dtype != present[0].dtype):
            raise DataError(
                f"sample {index}: {name} is {value.dtype} {tuple(value.shape)}, which cannot be put behind "
                f"{present[0].dtype} {tuple(present[0].shape)}"
            )
    return torch.cat(present)


def _make_grids(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    for index, value in enumerate(column):
        if value is not None and (value.dim() != 2 or value.shape[1] != 3):
            raise DataError(f"sample {index}: {name} must be (n, 3), not {tuple(value.shape)}")
    return _make_rows(column, name, spec, frame)


def _make_grid_values(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    present = [value for value in column if value is not None]
    if not present:
        return None
    filled = []
    for index, (value, item) in enumerate(zip(column, frame.items)):
        grids = getattr(item, spec.grids)
        rows = 0 if grids is None else len(grids)
        if value is not None and value.shape != (rows,):
            raise DataError(f"sample {index}: {name} is {tuple(value.shape)}, its {spec.grids} hold {rows}")
        filled.append(present[0].new_full((rows,), spec.fill) if value is None else value)
    return _make_rows(filled, name, spec, frame)


def _make_patches(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> T | None:
    grids = [getattr(item, spec.grids) for item in frame.items]
    gridless = any(value is not None and len(value) and grid is None for value, grid in zip(column, grids))
    if gridless and any(grid is not None for grid in grids):
        raise DataError(f"{name}: some samples have {spec.grids} and others have {name} without them")
    for index, (value, grid) in enumerate(zip(column, grids)):
        if value is not None and grid is not None and len(value) != int(grid.prod(-1).sum()):
            raise DataError(f"sample {index}: {name} has {len(value)} patches, its {spec.grids} are {grid.tolist()}")
    return _make_rows(column, name, spec, frame)


def _make_objects(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> list | None:
    return None if all(value is None for value in column) else list(column)


def _make_info(column: Column, name: str, spec: FieldSpec, frame: _Frame) -> dict:
    return batch_info(column, frame.layout.info)


_MAKERS: dict[Kind, Callable[[Column, str, FieldSpec, _Frame], Any]] = {
    Kind.TOKENS: _make_tokens,
    Kind.ACTIONS: _make_actions,
    Kind.NUMBERS: _make_numbers,
    Kind.SAMPLE: _make_sample,
    Kind.SAMPLES: _make_samples,
    Kind.COUNTS: _make_counts,
    Kind.GRIDS: _make_grids,
    Kind.GRID_VALUES: _make_grid_values,
    Kind.PATCHES: _make_patches,
    Kind.OBJECTS: _make_objects,
    Kind.INFO: _make_info,
}
