"""The captions of the embedded drawing runs, as files: those to train on, and combinations that RL never names."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import ConfigError
from ...runtime.files import write_atomic
from .drawn_shapes import ShapeCaption, all_captions, held_out
from .task import HELD_OUT

EVAL_REPEATS = 16  # images drawn of each held-out caption in an evaluation
VERSION = 2  # of the split; part of the folder's name


def embedded_prompts(root: Path, split: str = "test") -> tuple[Path, Path]:
    """The embedded captions as jsonl files (train, held out) below `root`.

    test: 18 combinations of colour and shape to train on; the other 6, one of each colour, are held out, each
    EVAL_REPEATS times; every colour and every shape in them is also in train, with other partners. dev, for tuning: of
    the 18 another 6 are held out, and 12 are trained on, so that a setting is chosen without the test captions.

    Raises:
        ConfigError: for another split.
    """
    if split not in HELD_OUT:
        raise ConfigError(f"eval_split is {split!r}; the embedded captions are held out as {' or '.join(HELD_OUT)}")
    folder = root / "data" / f"drawn-shapes-v{VERSION}"
    train, kept = caption_split(split)
    paths = folder / ("train.jsonl" if split == "test" else f"train_{split}.jsonl"), folder / f"{split}.jsonl"
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
