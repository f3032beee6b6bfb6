"""What each tensor of an experience is: one `FieldSpec` on the dataclass field, read by the generic replay routines.

Adding a tensor to experiences is one line: a field with `replay_field(kind)` in the class that batches and items share.
"""

import enum
import functools
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ..errors import DataError
from ..runtime.host_copies import to_device

T = torch.Tensor

_KEY = "replay"


class Kind(enum.Enum):
    """How a field is batched. B samples, S tokens, A actions (response tokens) of one sample."""

    TOKENS = enum.auto()  # item (S), batch (B, S) or (1, total)
    ACTIONS = enum.auto()  # item (A), batch (B, A) or (1, total)
    NUMBERS = enum.auto()  # like ACTIONS, or one number for the whole sample: item (1)
    SAMPLE = enum.auto()  # item of one shape for all samples, batch (B, *shape)
    SAMPLES = enum.auto()  # a dict of SAMPLE tensors
    COUNTS = enum.auto()  # item () long: how many media belong to the sample
    VISION = enum.auto()  # VisionTensors of one sample, and of B samples
    OBJECTS = enum.auto()  # item any object, batch list of B
    INFO = enum.auto()  # item dict, batch dict of columns


@dataclass(frozen=True)
class FieldSpec:
    """Metadata of one field.

    fill: what a batch holds for a sample that lacks the field while others have it. mask_dtype: set on masks, which a
    padded batch must have even when no item has one. segments: in packed form a real token holds its sample index + 1.
    media: "image" or "video", what COUNTS counts.
    """

    kind: Kind
    fill: float = 0
    mask_dtype: torch.dtype | None = None
    segments: bool = False
    media: str = ""


def replay_field(kind: Kind, *, default: Any = MISSING, **spec: Any) -> Any:
    """A dataclass field that the replay routines understand; required unless `default` is given."""
    return field(default=default, metadata={_KEY: FieldSpec(kind, **spec)})


@functools.cache
def replay_fields(cls: type) -> dict[str, FieldSpec]:
    """{field name: FieldSpec} of the fields of `cls` that belong to single samples."""
    return {each.name: each.metadata[_KEY] for each in fields(cls) if _KEY in each.metadata}


def tensors_equal(left: T, right: T) -> bool:
    """Same shape, dtype and values; NaN equals NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    return bool(((left == right) | ((left != left) & (right != right))).all())


def values_equal(left: Any, right: Any) -> bool:
    """Equality of nested dicts, lists, tensors, images and plain objects; types must agree (1 is not 1.0)."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return tensors_equal(left, right)
    if isinstance(left, Image.Image) and isinstance(right, Image.Image):
        return left.mode == right.mode and left.size == right.size and left.tobytes() == right.tobytes()
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(values_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(values_equal, left, right))
    return bool(left == right) or bool(left != left and right != right)


KeyPath = tuple[Hashable, ...]


@dataclass
class InfoLayout:
    """By path of keys: samples that lack the key, and Python numbers that the batch holds as a tensor."""

    missing: dict[KeyPath, list[int]] = field(default_factory=dict)
    scalars: dict[KeyPath, list] = field(default_factory=dict)


def zero_pad_sequences(sequences: Sequence[T], side: str = "left") -> T:
    """Stack tensors (L_i) to (B, max L), zeros at `side` ("left" or "right", else AssertionError).

    The last dimension is the padded one. Raises DataError without sequences. After LightRFT.
    """
    if side not in ("left", "right"):
        raise AssertionError(f"side must be 'left' or 'right', not {side!r}")
    if not sequences:
        raise DataError("no sequences to pad")
    width = max(sequence.size(-1) for sequence in sequences)
    missing = [width - sequence.size(-1) for sequence in sequences]
    pads = [(count, 0) if side == "left" else (0, count) for count in missing]
    return torch.stack([F.pad(sequence, pad) for sequence, pad in zip(sequences, pads)])


def scatter_samples(flat: T, spans: Sequence[tuple[int, int]], width: int) -> T:
    """The samples' values to (B, width, ...): each sample's in its span, zeros elsewhere.

    Args:
        flat: (sum of lengths, ...), one sample behind the other.
        spans: of each sample (start, stop) columns, as many as it has values.
        width: columns of the result.
    """
    bounds, column = torch.tensor(spans, dtype=torch.long).reshape(-1, 2), torch.arange(width)
    # On the host: a device's would be waited for.
    where = ((column >= bounds[:, :1]) & (column < bounds[:, 1:])).flatten().nonzero().squeeze(1)
    padded = flat.new_zeros((len(spans) * width, *flat.shape[1:])).index_copy(0, to_device(where, flat.device), flat)
    return padded.view(len(spans), width, *flat.shape[1:])


def unpack_actions(flat: T, num_actions: Sequence[int]) -> T:
    """Packed per-action values (1, sum of A) or (sum of A) to (B, max A), right-padded with zeros.

    Gradients flow through. Raises DataError when the length is not the sum of `num_actions`.
    """
    flat = flat.reshape(-1)
    if flat.numel() != sum(num_actions):
        raise DataError(f"{flat.numel()} per-action values for {sum(num_actions)} actions")
    return scatter_samples(flat, [(0, count) for count in num_actions], max(num_actions, default=0))


_MISSING = object()
_INT64_LIMIT = 2**63


def batch_info(infos: Sequence[dict | None], layout: InfoLayout, path: KeyPath = ()) -> dict:
    """Columns of the samples' `info` dicts.

    Equal-shaped tensors are stacked to (B, ...), Python numbers of one type become a tensor (B), dicts are batched key
    by key, anything else is a list of B. A key that some samples lack is a list with None for them, never a tensor
    with made-up numbers.

    Args:
        infos: of the samples; None is an empty one.
        layout: takes down what `split_info` needs to give back the same dicts.
        path: of keys to these dicts, where they are parts of larger ones.
    """
    dicts = [info or {} for info in infos]
    keys = dict.fromkeys(key for each in dicts for key in each)
    return {key: _batch_column([each.get(key, _MISSING) for each in dicts], (*path, key), layout) for key in keys}


def _batch_column(values: list, path: KeyPath, layout: InfoLayout) -> Any:
    missing = [index for index, value in enumerate(values) if value is _MISSING]
    if missing:
        layout.missing[path] = missing
    if all(value is _MISSING or isinstance(value, dict) for value in values):
        return batch_info([None if value is _MISSING else value for value in values], layout, path)
    if missing:
        return [None if value is _MISSING else value for value in values]
    if all(isinstance(value, torch.Tensor) for value in values):
        first = values[0]
        alike = all(value.shape == first.shape and value.dtype == first.dtype for value in values)
        return torch.stack(values) if alike else values
    if _numbers(values):
        layout.scalars[path] = values
        return torch.tensor(values)
    return values


def _numbers(values: list) -> bool:
    kind = type(values[0])
    if kind not in (bool, int, float) or any(type(value) is not kind for value in values):
        return False
    return kind is not int or all(-_INT64_LIMIT <= value < _INT64_LIMIT for value in values)


def split_info(info: dict, size: int, layout: InfoLayout, path: KeyPath = ()) -> list[dict]:
    """One dict per sample. Tensors (B, ...) and lists of B go by sample, dicts are split key by key, anything else
    (scalars, strings, lists of another length) goes to all samples.

    Args:
        info: as from `batch_info`; keys may have come since. DataError on a tensor whose first dimension is not B.
        size: B.
        layout: what `batch_info` took down: missing keys, and numbers, which come back as Python numbers.
        path: of keys to this dict, where it is part of a larger one.
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
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, list) and len(value) == size else [value] * size
    if value.dim() == 0:
        return [value.clone() for _ in range(size)]
    if len(value) != size:
        name = "/".join(map(str, path))
        raise DataError(f"info[{name}] has shape {tuple(value.shape)}, but the batch has {size} samples")
    # The numbers come back at full precision, unless someone has put other values in their place.
    numbers = layout.scalars.get(path)
    if numbers is not None and tensors_equal(torch.tensor(numbers), value.cpu()):
        return numbers
    return [sample.clone() for sample in value.unbind()]
