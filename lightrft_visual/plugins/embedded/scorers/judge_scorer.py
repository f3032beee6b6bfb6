"""The gold judge of the embedded drawings as a scorer, and what a set of images shows by it.

For measuring, not for training: a run that is rewarded by its own judge has no independent one left.
"""

import torch

from ..drawn_shapes import parse_caption
from ..shape_judge import embedded_judge
from .shape_match import ShapeMatch

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


class ShapeJudgeScorer(ShapeMatch):
    """The scorer `shape_judge`: all that the caption names unless `part` says otherwise; see `ShapeMatch`."""

    name, parts = "shape_judge", PARTS
    measure = staticmethod(judge_images)
