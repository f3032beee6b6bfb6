"""A reward for models that draw: `frames` holds one list of PIL pictures a sample.

As the reward of a run, as one component among others, or behind a server (docs/rewards.md):

    deepspeed examples/train_flow_grpo.py --reward_fn examples/rewards/picture.py:score
    reward.components.mine=1.0 reward.kwargs.mine.scorer=examples/rewards/picture.py:score
    lightrft-visual serve-reward --reward_fn examples/rewards/picture.py:score

In vision-language training the same function would judge the pictures of the prompts.
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
