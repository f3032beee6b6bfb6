"""What each tensor of an experience is: one `FieldSpec` on the dataclass field, read by the generic replay routines.

Adding a tensor to experiences is one line: a field with `replay_field(kind)` in the class that batches and items share.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from PIL import Image

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
