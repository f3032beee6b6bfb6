"""Simple rules over pixels, for tests, demonstrations and shaping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import ConfigError, did_you_mean
from .image_scoring import mean_over_frames

# Each reads (H, W, 3) float in 0..1 and gives a number in 0..1.
RULES: dict[str, Callable[[np.ndarray], float]] = {
    "brightness": lambda p: float(p.mean()),
    "darkness": lambda p: float(1 - p.mean()),
    "red": lambda p: _share(p, 0),
    "green": lambda p: _share(p, 1),
    "blue": lambda p: _share(p, 2),
    "saturation": lambda p: float((p.max(axis=2) - p.min(axis=2)).mean()),
    "contrast": lambda p: float(min(1.0, 2 * p.mean(axis=2).std())),
    "detail": lambda p: float(min(1.0, np.abs(np.diff(p, axis=0)).mean() + np.abs(np.diff(p, axis=1)).mean())),
}


def _share(pixels: np.ndarray, channel: int) -> float:
    """How far a channel exceeds the stronger of the other two, mean over pixels, clipped at 0."""
    others = np.delete(pixels, channel, axis=2).max(axis=2)
    return float(np.clip(pixels[..., channel] - others, 0, None).mean())


class Pixel:
    """One of RULES, by name. A flat image satisfies the colour rules completely: weigh them against `contrast` or
    `detail`."""

    def __init__(self, rule: str = "brightness") -> None:
        if rule not in RULES:
            raise ConfigError(f"pixel: there is no rule {rule!r}{did_you_mean(rule, RULES)}")
        self._rule = RULES[rule]

    def __call__(self, frames: list[list[Any]]) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            return [self._rule(np.asarray(p.convert("RGB"), dtype=np.float32) / 255) for p in images]

        return mean_over_frames(frames, [""] * len(frames), score)
