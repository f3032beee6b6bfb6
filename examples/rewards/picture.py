"""A reward for models that draw: `images` are the made pictures, one PIL picture a prompt.

Used as a component of a diffusion run:

    reward.components.mine=1.0 reward.kwargs.mine.scorer=examples/rewards/picture.py:score

The same function judges the pictures of a prompt's first sample in vision-language training, where `images` holds one
list of pictures a sample; `frames` would give both the same form.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def score(frames: list[list[Any]]) -> list[float | None]:
    """How colourful the pictures are (standard deviation of the opponent colours), 0..1; None without a picture."""
    return [float(np.mean([_colourful(f) for f in row])) if row else None for row in frames]


def _colourful(picture: Any) -> float:
    red, green, blue = np.moveaxis(np.asarray(picture.convert("RGB"), dtype=np.float64) / 255, 2, 0)
    spread = np.hypot((red - green).std(), ((red + green) / 2 - blue).std())
    return float(min(1.0, 2 * spread))
