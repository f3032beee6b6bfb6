"""What a batched `info` dict no longer shows, so that it can be split into the same dicts again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

KeyPath = tuple[Hashable, ...]


@dataclass
class InfoLayout:
    """By path of keys: samples that lack the key, and Python numbers that the batch holds as a tensor."""

    missing: dict[KeyPath, list[int]] = field(default_factory=dict)
    scalars: dict[KeyPath, list] = field(default_factory=dict)
