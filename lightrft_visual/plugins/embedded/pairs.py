"""The embedded preference pairs: drawn shapes, the chosen image as its caption says, the rejected one with another
colour or shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from ...data.media import to_pil
from .cached import built_once
from .captions import embedded_prompts
from .drawn_shapes import COLOURS, SHAPES, ShapeCaption, parse_caption, random_images

PAIRS_A_CAPTION = 16
SIZE = 32  # pixels


def embedded_pairs(root: Path, split: str = "test") -> Path:
    """A jsonl file of pairs (prompt, chosen, rejected) of the captions to train on, below `root`; split: what is held
    out, see `embedded_prompts`."""
    train, _ = embedded_prompts(root, split)
    texts = [json.loads(line)["prompt"] for line in train.read_text().splitlines()]
    digest = hashlib.sha256(repr((texts, PAIRS_A_CAPTION, SIZE)).encode()).hexdigest()[:12]
    folder = root / "data" / f"drawn-pairs-v1-{digest}"
    return built_once(folder, lambda aside: _write(aside, texts)) / "pairs.jsonl"


def _write(folder: Path, texts: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    chosen = [parse_caption(text) for text in texts for _ in range(PAIRS_A_CAPTION)]
    rejected = [_another(caption, place) for place, caption in enumerate(chosen)]
    names = []
    for name, captions in (("chosen", chosen), ("rejected", rejected)):
        colours, shapes = (torch.tensor([getattr(each, part) for each in captions]) for part in ("colour", "shape"))
        images: list[Image.Image] = [to_pil(each) for each in random_images(colours, shapes, SIZE, generator)]
        names.append([f"{name}_{place:04d}.png" for place in range(len(images))])
        for file, image in zip(names[-1], images):
            image.save(folder / file)
    rows = zip((text for text in texts for _ in range(PAIRS_A_CAPTION)), *names)
    lines = [json.dumps(dict(zip(("prompt", "chosen", "rejected"), row))) + "\n" for row in rows]
    (folder / "pairs.jsonl").write_text("".join(lines))


def _another(caption: ShapeCaption, place: int) -> ShapeCaption:
    """Another colour, another shape, or both, in turn."""
    colour, shape = (caption.colour + 1 + place % 5) % len(COLOURS), (caption.shape + 1 + place % 3) % len(SHAPES)
    return (ShapeCaption(colour, caption.shape), ShapeCaption(caption.colour, shape), ShapeCaption(colour, shape))[
        (place // 5) % 3
    ]
