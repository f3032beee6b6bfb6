"""The `info` dict of an experience: columns in a batch, plain values in a single sample."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DataError
from .fields import tensors_equal
from .info_layout import InfoLayout, KeyPath

_MISSING = object()
_INT64_LIMIT = 2**63


def batch_info(infos: list[dict | None], layout: InfoLayout) -> dict:
    """Columns of the samples' `info` dicts.

    Equal-shaped tensors are stacked to (B, ...), Python numbers of one type become a tensor (B), dicts are batched key
    by key, anything else is a list of B. A key that some samples lack is a list with None for them, never a tensor
    with made-up numbers. `layout` takes down what `split_info` needs to give back the same dicts.
    """
    return _batch_dicts([info or {} for info in infos], (), layout)


def _batch_dicts(dicts: list[dict], path: KeyPath, layout: InfoLayout) -> dict:
    keys = dict.fromkeys(key for each in dicts for key in each)
    return {key: _batch_column([each.get(key, _MISSING) for each in dicts], (*path, key), layout) for key in keys}


def _batch_column(values: list, path: KeyPath, layout: InfoLayout) -> Any:
    missing = [index for index, value in enumerate(values) if value is _MISSING]
    if missing:
        layout.missing[path] = missing
    if all(value is _MISSING or isinstance(value, dict) for value in values):
        return _batch_dicts([{} if value is _MISSING else value for value in values], path, layout)
    if missing:
        return [None if value is _MISSING else value for value in values]
    if _stackable(values):
        return torch.stack(values)
    if _numbers(values):
        layout.scalars[path] = values
        return torch.tensor(values)
    return values


def _stackable(values: list) -> bool:
    first = values[0]
    return isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and value.shape == first.shape and value.dtype == first.dtype
        for value in values
    )


def _numbers(values: list) -> bool:
    kind = type(values[0])
    if kind not in (bool, int, float) or any(type(value) is not kind for value in values):
        return False
    return kind is not int or all(-_INT64_LIMIT <= value < _INT64_LIMIT for value in values)


def split_info(info: dict, size: int, layout: InfoLayout, path: KeyPath = ()) -> list[dict]:
    """One dict per sample. Tensors (B, ...) and lists of B go by sample, dicts are split key by key, anything else
    (scalars, strings, lists of another length) goes to all samples.

    Raises DataError on a tensor whose first dimension is not B.
    """
    items: list[dict] = [{} for _ in range(size)]
    for key, value in info.items():
        here = (*path, key)
        missing = set(layout.missing.get(here, ()))
        for index, part in enumerate(_split_column(value, size, layout, here)):
            if index not in missing:
                items[index][key] = part
    return items


def _split_column(value: Any, size: int, layout: InfoLayout, path: KeyPath) -> list:
    if isinstance(value, dict):
        return split_info(value, size, layout, path)
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, size, layout.scalars.get(path), path)
    if isinstance(value, list) and len(value) == size:
        return value
    return [value] * size


def _split_tensor(value: torch.Tensor, size: int, numbers: list | None, path: KeyPath) -> list:
    if value.dim() == 0:
        return [value.clone() for _ in range(size)]
    if len(value) != size:
        name = "/".join(map(str, path))
        raise DataError(f"info[{name}] has shape {tuple(value.shape)}, but the batch has {size} samples")
    # The numbers come back at full precision, unless someone has put other values in their place.
    if numbers is not None and tensors_equal(torch.tensor(numbers), value.cpu()):
        return numbers
    return [sample.clone() for sample in value.unbind()]
