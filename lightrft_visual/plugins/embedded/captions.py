"""The captions of the embedded drawing runs, as files: those to train on, and combinations that RL never names; and
preference pairs: drawn shapes, the chosen image as its caption says, the rejected one with another colour or shape."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from ...data.media import to_pil
from ...runtime.files import write_atomic
from .cached import built_once
from .drawn_shapes import COLOURS, SHAPES, ShapeCaption, all_captions, held_out, parse_caption, random_images
from .task import TaskFolder

EVAL_REPEATS = 16  # images drawn of each held-out caption in an evaluation
VERSION = 2  # of the split; part of the folder's name
PAIRS_A_CAPTION = 16
PAIR_SIZE = 32  # pixels


def embedded_prompts(root: Path, split: str = "test") -> tuple[Path, Path]:
    """The embedded captions as jsonl files (train, held out) below `root`.

    test: 18 combinations of colour and shape to train on; the other 6, one of each colour, are held out, each
    EVAL_REPEATS times; every colour and every shape in them is also in train, with other partners. dev, for tuning: of
    the 18 another 6 are held out, and 12 are trained on, so that a setting is chosen without the test captions.

    Raises:
        ConfigError: for another split.
    """
    folder = root / "data" / f"drawn-shapes-v{VERSION}"
    train, kept = caption_split(split)
    paths = folder / ("train.jsonl" if split == "test" else f"train_{split}.jsonl"), TaskFolder(folder).held_out(split)
    for path, prompts in zip(paths, (train, kept * EVAL_REPEATS)):
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, "".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return paths


def caption_split(split: str, captions: list[ShapeCaption] | None = None) -> tuple[list[str], list[str]]:
    """Captions (to train on, held out), see `embedded_prompts`; of those without a place unless others are given."""
    captions = all_captions() if captions is None else captions
    known = [caption for caption in captions if split == "test" or not held_out(caption)]
    train = [caption.text for caption in known if not held_out(caption, split)]
    return train, [caption.text for caption in known if held_out(caption, split)]


def embedded_pairs(root: Path, split: str = "test") -> Path:
    """A jsonl file of pairs (prompt, chosen, rejected) of the captions to train on, below `root`; split: what is held
    out, see `embedded_prompts`."""
    train, _ = embedded_prompts(root, split)
    texts = [json.loads(line)["prompt"] for line in train.read_text().splitlines()]
    digest = hashlib.sha256(repr((texts, PAIRS_A_CAPTION, PAIR_SIZE)).encode()).hexdigest()[:12]
    folder = root / "data" / f"drawn-pairs-v1-{digest}"
    return built_once(folder, lambda aside: _draw_pairs(aside, texts)) / "pairs.jsonl"


def _draw_pairs(folder: Path, texts: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    chosen = [parse_caption(text) for text in texts for _ in range(PAIRS_A_CAPTION)]
    rejected = [_another(caption, place) for place, caption in enumerate(chosen)]
    names = []
    for name, captions in (("chosen", chosen), ("rejected", rejected)):
        colours, shapes = (torch.tensor([getattr(each, part) for each in captions]) for part in ("colour", "shape"))
        images: list[Image.Image] = [to_pil(each) for each in random_images(colours, shapes, PAIR_SIZE, generator)]
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
