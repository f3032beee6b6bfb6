"""The embedded task of a model that sees and draws: questions about scenes, and captions to draw.

A row that asks for an image says so by `draw`; its label is 'drawing'. To train on there is a file of each kind; what
is held out is in one file, in turns. A caption names a colour, a shape and one of four places, such as 'a red circle at
the top left'. 24 of the 96 captions are held out for the test; for dev, on which settings are chosen, another 24 of
those that are left. Every two words of a held-out caption are trained on together, with another third one: where a
pair itself was held out (captions of a colour and a shape alone), a model learned not to draw it.
"""

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ...config.vl import ModelConfig, RunConfig
from ...runtime.files import cache_folder
from ..embedded.cached import built_once
from ..embedded.captions import caption_split
from ..embedded.drawn_shapes import placed_captions
from ..embedded.task import HELD_OUT, TaskFolder
from ..embedded.warmup import embedded_task

VERSION = 5  # of the rows and of the split
EVAL_ROWS = 240  # of each kind


class UnifiedTask(TaskFolder):
    """Paths of the task on disk."""

    def questions(self) -> Path:
        """To train on."""
        return self.folder / "questions_train.jsonl"

    def drawings(self, split: str = "test") -> Path:
        """To train on, where this split is held out."""
        return self.folder / f"drawings_train_{split}.jsonl"

    def train(self, split: str = "test") -> str:
        """Both, as `prompt_data`: a data set of each kind."""
        return f"{self.drawings(split)},{self.questions()}"


def unified_task(root: Path | None = None) -> UnifiedTask:
    """The task on disk, written at the first call below the cache."""
    root = root or cache_folder()
    task = embedded_task(root)

    def build(folder: Path) -> None:
        folder.mkdir(parents=True)
        asked = _questions(task.folder, "train")
        _write(folder / "questions_train.jsonl", asked)
        for split in HELD_OUT:
            train, kept = caption_split(split, placed_captions())
            _write(folder / f"drawings_train_{split}.jsonl", _drawings(train, len(asked)))
            asked_then = _questions(task.folder, split)[:EVAL_ROWS]
            pairs = zip(asked_then, _drawings(kept, len(asked_then)), strict=True)
            _write(folder / f"{split}.jsonl", [row for pair in pairs for row in pair])

    return UnifiedTask(built_once(root / "data" / f"unified-v{VERSION}-{task.folder.name}", build))


def checkpoint(model: ModelConfig) -> str:
    """The folder of the embedded Janus, built at its first use."""
    from .tiny_janus import UnifiedWarmUp, embedded_janus  # with transformers

    return str(embedded_janus(UnifiedWarmUp()))


def place(config: RunConfig) -> None:
    """Put the files of questions and captions in the place of their name; held-out ones where no others are named."""
    task, split = unified_task(), config.data.eval_split
    held_out = task.held_out(split)
    config.data.prompt_data = task.train(split)
    config.data.eval_data = config.data.eval_data or str(held_out)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _questions(folder: Path, split: str) -> list[dict[str, Any]]:
    with open(folder / f"{split}.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [row | {"images": [str(folder / name) for name in row["images"]], "draw": False} for row in rows]


def _drawings(captions: list[str], count: int) -> list[dict[str, Any]]:
    """`count` rows, the captions again and again."""
    shared = {"images": [], "label": "drawing", "draw": True}
    return [{"prompt": text, "reference": text, **shared} for text in islice(cycle(captions), count)]
