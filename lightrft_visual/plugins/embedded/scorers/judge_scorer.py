"""The gold judge of the embedded drawings as a scorer, and what a set of images shows by it.

For measuring, not for training: a run that is rewarded by its own judge has no independent one left.
"""

from __future__ import annotations

from typing import Any

import torch

from ....errors import ConfigError
from ..drawn_shapes import parse_caption
from ..shape_judge import embedded_judge
from .shape_match import pixels_of

T = torch.Tensor
PARTS = ("score", "both", "colour", "shape", "place")


def judge_images(images: T, captions: list[str]) -> dict[str, T]:
    """How sure the judge is that images (B, 3, H, W) in 0..1 show what B captions name.

    Returns float tensors (B) in 0..1: `colour`, `shape`, `both` of them, `place` (1 where the caption names none), and
    `score`, all of it; NaN for a caption that names no known colour and shape. Captions with a place have a judge of
    their own, which knows places too.
    """
    wanted = [parse_caption(caption) for caption in captions]
    named = [(-1, -1, -1) if each is None else (each.colour, each.shape, each.place) for each in wanted]
    found = torch.full((3, len(wanted)), float("nan"))
    for placed in (False, True):
        rows = [row for row, each in enumerate(wanted) if each and (each.place is not None) == placed]
        if rows:
            labels = torch.tensor([named[row][: 3 if placed else 2] for row in rows])
            logs = embedded_judge(placed)(images[rows].float().clamp(0, 1))
            sure = [log.gather(1, label[:, None])[:, 0].exp() for log, label in zip(logs, labels.unbind(1))]
            found[:, rows] = torch.stack([*sure, torch.ones(len(rows))][:3])
    colour, shape, place = found
    return {"score": colour * shape * place, "both": colour * shape, "colour": colour, "shape": shape, "place": place}


class ShapeJudgeScorer:
    """The scorer `shape_judge`: all that the caption names unless `part` says otherwise.

    The mean over a video's frames; None for a caption that names no known colour and shape.
    """

    def __init__(self, part: str = "score") -> None:
        if part not in PARTS:
            raise ConfigError(f"shape_judge: part is {part!r}; it must be one of: {', '.join(PARTS)}")
        self.part = part

    def __call__(self, frames: list[list[Any]], prompts: list[str]) -> list[float | None]:
        return [self._score(images, prompt) for images, prompt in zip(frames, prompts)]

    def _score(self, pictures: list[Any], prompt: str) -> float | None:
        if not pictures or parse_caption(prompt) is None:
            return None
        return float(judge_images(pixels_of(pictures), [prompt] * len(pictures))[self.part].mean())
