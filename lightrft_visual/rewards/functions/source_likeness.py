"""How like a made image is to the one that it was made from."""

from __future__ import annotations

from typing import Any

import numpy as np


class SourceLikeness:
    """1 minus the mean absolute difference of colours in 0..1, of the last image and the last source image, both at
    the smaller one's size. None where one is missing."""

    def __call__(self, frames: list[list[Any]], source_images: list[list[Any]]) -> list[float | None]:
        return [
            _likeness(made[-1], shown[-1]) if made and shown else None for made, shown in zip(frames, source_images)
        ]


def _likeness(made: Any, shown: Any) -> float:
    size = min(made.size, shown.size, key=lambda each: each[0] * each[1])
    pixels = [np.asarray(image.convert("RGB").resize(size), dtype=np.float32) / 255 for image in (made, shown)]
    return 1.0 - float(np.abs(pixels[0] - pixels[1]).mean())
