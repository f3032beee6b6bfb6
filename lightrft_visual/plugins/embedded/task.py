"""What the embedded vision-language tasks share: files of four splits on disk, and warm-up pairs read from them.

    demonstrations  questions with responses for the supervised warm-up
    train           questions for RL; only the reward knows the answers
    dev             like train; for choosing settings
    test            like train; for reporting, and for nothing else

An image (a question, where it has none) belongs to one split only: the hash of its content says to which, so no image
of test can be in another split, whatever the seed. Every row depends on (seed, split, row) alone, so a task of more
rows starts with the rows of a shorter one.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from ...errors import ConfigError
from ...rollout.environments import Environment
from ...runtime.seeding import derive_seed
from .cached import built_once

SPLITS = ("demonstrations", "train", "dev", "test")
HELD_OUT = ("dev", "test")
_BUCKETS = {"demonstrations": 4, "train": 8, "dev": 2, "test": 2}  # shares of all images, by their pixels' hash


@dataclass(frozen=True)
class TaskFolder:
    """A task on disk."""

    folder: Path

    def held_out(self, name: str) -> Path:
        """The split to evaluate on. Raises ConfigError for other names than dev and test."""
        if name not in HELD_OUT:
            raise ConfigError(f"eval_split is {name!r}; the embedded task evaluates on {' or '.join(HELD_OUT)}")
        return self.folder / f"{name}.jsonl"


@dataclass(frozen=True)
class EmbeddedTask(TaskFolder):
    """Paths of a task: a jsonl file for each split; image paths in them start from `folder`."""

    demonstrations: Path
    train: Path
    dev: Path
    test: Path


@dataclass(frozen=True)
class Question:
    """A drawn question. images: in the order of their placeholders; looks: their colours and shapes; demonstration:
    the response of the warm-up where it is not the answer itself. turns: of a conversation instead, with what tools
    answer: (role, text or image). columns: of the row, for environments."""

    kind: str
    prompt: str
    images: list[Image.Image]
    answer: str
    looks: set[tuple[str, str]] = field(default_factory=set)
    demonstration: str | None = None
    turns: list[tuple[str, str | Image.Image]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SupervisedPair:
    """One example of the supervised warm-up: a data row's question and images, and the response to imitate.

    before: turns behind the question, (role, text or the absolute path of an image).
    """

    prompt: str
    images: tuple[str, ...]  # absolute paths
    answer: str
    kind: str
    before: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TaskSource:
    """How the questions of a task are drawn.

    name, version: part of the folder's name, so a change of the drawing must change the version. draw: a question from
    (row, split, random numbers of this row, side of the images). stream: names the random
    numbers; a row's follow from it, the task's seed and version, the split and the row. vocabulary_texts: hold every
    word, digit and sign of the task; a tokenizer trained on them knows it all. warm_up: settings of its base that
    differ from the usual. environment: makes the one that conversations are held with.
    """

    name: str
    version: int
    draw: Callable[[int, str, random.Random, int], Question]
    stream: str
    vocabulary_texts: Callable[[], list[str]]
    warm_up: dict[str, Any] = field(default_factory=dict)
    environment: Callable[[], Environment] | None = None

    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools that the model is shown."""
        return self.environment().schemas() if self.environment else []


def build_task(
    source: TaskSource,
    folder: str | os.PathLike,
    seed: int = 0,
    n_train: int = 4096,
    n_eval: int = 256,
    size: int = 56,
    n_demonstrations: int = 1536,
) -> EmbeddedTask:
    """Write the task below `folder`, or find it there, and return its paths.

    The sub-folder is named after all arguments; several processes may call this at once.

    Args:
        source: of the questions.
        folder: that of all tasks.
        seed: of the random numbers of every row.
        n_train: questions of train.
        n_eval: questions of dev and of test each.
        size: pixels of an image's side, for sources that draw at any size.
        n_demonstrations: questions of demonstrations.
    """
    sizes = f"{n_demonstrations}-{n_train}-{n_eval}-{size}px"
    target = Path(folder) / f"{source.name}-v{source.version}-seed{seed}-{sizes}"

    def build(aside: Path) -> None:
        for split, rows in zip(SPLITS, (n_demonstrations, n_train, n_eval, n_eval)):
            _write_split(source, aside, split, rows, seed, size)

    built_once(target, build)
    return EmbeddedTask(target, *(target / f"{split}.jsonl" for split in SPLITS))


def _write_split(source: TaskSource, folder: Path, split: str, rows: int, seed: int, size: int) -> None:
    (folder / "images" / split).mkdir(parents=True)
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for index in range(rows):
            own = derive_seed(seed, source.stream, source.version, split, index)
            question = _drawn(source, index, split, random.Random(own), size)
            names = [f"images/{split}/{index:06d}-{place}.png" for place in range(len(question.images))]
            for name, image in zip(names, question.images):
                image.save(folder / name)
            row = {"prompt": question.prompt, "images": names, "reference": question.answer, "label": question.kind}
            row |= question.columns
            if split == "demonstrations" and question.demonstration is not None:
                row["demonstration"] = question.demonstration
            if split == "demonstrations" and question.turns:
                row["turns"] = [
                    _stored(turn, folder, f"{names[0][:-4]}-{i}.png") for i, turn in enumerate(question.turns)
                ]
            file.write(json.dumps(row) + "\n")


def _drawn(source: TaskSource, row: int, split: str, rng: random.Random, size: int) -> Question:
    """A question of this row that belongs to the split: drawn again until it does."""
    while True:
        question = source.draw(row, split, rng, size)
        if belongs(question, split):
            return question


def _stored(turn: tuple[str, str | Image.Image], folder: Path, name: str) -> list[str]:
    """A turn as the row has it: an image by its name."""
    role, content = turn
    if isinstance(content, str):
        return [role, content]
    content.save(folder / name)
    return [role, name]


def belongs(question: Question, split: str) -> bool:
    """Whether all that the question shows may stand in this split."""
    contents = [image.tobytes() for image in question.images] or [question.prompt.encode()]
    return all(split_of(content) == split for content in contents)


def split_of(content: bytes) -> str:
    """The one split that may hold this image (its pixels), or this question without image (its text)."""
    bucket = hashlib.sha256(content).digest()[0] % sum(_BUCKETS.values())
    for split, share in _BUCKETS.items():
        bucket -= share
        if bucket < 0:
            return split
    raise AssertionError("the buckets add up")


def supervised_pairs(jsonl: str | os.PathLike, *, seed: int, epochs: int | None = None) -> Iterator[SupervisedPair]:
    """Shuffled warm-up examples: the right answers, or the responses of the task's demonstrations.

    Args:
        jsonl: file of a split.
        seed: of the order, with the number of the pass.
        epochs: passes over the file; None: without end.
    """
    path = Path(jsonl)
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    epoch = 0
    while epochs is None or epoch < epochs:
        rng = random.Random(derive_seed(seed, "warm-up", epoch))
        for row in rng.sample(rows, len(rows)):
            yield from _pairs_of(row, path.parent)
        epoch += 1


def _pairs_of(row: dict[str, Any], folder: Path) -> Iterator[SupervisedPair]:
    """The example of a row; of a conversation one for each response."""
    images = tuple(str(folder / name) for name in row["images"])
    if "turns" not in row:
        yield SupervisedPair(row["prompt"], images, row.get("demonstration", row["reference"]), row["label"])
        return
    turns = tuple((role, text if role == "assistant" else str(folder / text)) for role, text in row["turns"])
    for number, (role, text) in enumerate(turns):
        if role == "assistant":
            yield SupervisedPair(row["prompt"], images, text, row["label"], turns[:number])
