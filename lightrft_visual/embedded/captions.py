"""The captions of the embedded drawing runs, as files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .drawn_shapes import all_captions

EVAL_REPEATS = 4  # images drawn of each embedded caption in an evaluation


def embedded_prompts(root: Path) -> tuple[Path, Path]:
    """The embedded captions as jsonl files (train, test) below `root`: every colour with every shape."""
    folder = root / "data" / "drawn-shapes-v1"
    texts = [caption.text for caption in all_captions()]
    for name, prompts in (("train", texts), ("test", texts * EVAL_REPEATS)):
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
            os.replace(scratch, path)
    return folder / "train.jsonl", folder / "test.jsonl"
