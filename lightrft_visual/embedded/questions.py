"""The embedded visual question task: small drawn scenes on disk as PNG, questions as jsonl, a train and a test split.

It exists so that a run without any flag trains on real files through the same code as user data. A scene holds one to
three shapes of one colour. Kinds of questions, with their share in twentieths of the rows:

    count       6   how many shapes are there?                 1, 2, 3
    colour      5   what colour is it?                         red, green, blue, yellow
    shape       5   which shape is it?                         circle, square, triangle (one large shape)
    position    2   where is the shape?                        left, right, top, bottom (one shape)
    comparison  1   two images: which one has more shapes?     first, second (one against three)
    text        1   what is 1 plus 2?                          0, 1, 2, 3 (no image)

An answer is always one word or one digit. Every row depends on (seed, split, row) alone, so a task of more rows starts
with the rows of a shorter one, and train and test never share a random stream.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from ..errors import DataError
from ..strategy.seeding import derive_seed

VERSION = 4  # part of the folder's name: a change of the drawing must change it
SPLITS = ("train", "test")
BACKGROUND = (72, 72, 72)  # mid-dark: on white the shapes are a small part of the signal, and warm-up is short
COLOURS = {"red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 60, 220), "yellow": (235, 200, 20)}
SHAPES = ("circle", "square", "triangle")
ANSWERS: dict[str, tuple[str, ...]] = {
    "count": ("1", "2", "3"),
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "position": ("left", "right", "top", "bottom"),
    "comparison": ("first", "second"),
    "text": ("0", "1", "2", "3"),
}
QUESTIONS = {
    "count": "how many shapes are there?",
    "colour": "what colour is it?",
    "shape": "which shape is it?",
    "position": "where is the shape?",
    "comparison": "first <image> second <image> which one has more shapes?",
    "text": "what is {} plus {}?",
}
KINDS = tuple(ANSWERS)
_SHARES = {"count": 6, "colour": 5, "shape": 5, "position": 2, "comparison": 1, "text": 1}
_CYCLE = tuple(kind for kind in KINDS for _ in range(_SHARES[kind]))


@dataclass(frozen=True)
class EmbeddedTask:
    """Paths of a task on disk. `train` and `test` are jsonl files; image paths in them start from `folder`."""

    folder: Path
    train: Path
    test: Path


@dataclass(frozen=True)
class SupervisedPair:
    """One example of the supervised warm-up: a data row's question and images, and the answer to imitate."""

    prompt: str
    images: tuple[str, ...]  # absolute paths
    answer: str
    kind: str


@dataclass(frozen=True)
class _Scene:
    """What is drawn: centres and one radius in units of the image's side, a colour's and a shape's name."""

    centres: tuple[tuple[float, float], ...]
    radius: float
    colour: str
    shape: str


def build_embedded_task(
    folder: str | os.PathLike, seed: int = 0, n_train: int = 4096, n_eval: int = 200, size: int = 56
) -> EmbeddedTask:
    """Write the task below `folder`, or find it there, and return its paths.

    The sub-folder is named after all arguments and appears in one rename, so it is complete or absent: several
    processes may call this at once. size: side of the square images in pixels.
    Raises DataError for sizes that cannot be drawn.
    """
    if n_train < 1 or n_eval < 0 or size < 16:
        raise DataError(f"embedded task: n_train={n_train}, n_eval={n_eval}, size={size} (at least 1, 0, 16)")
    target = Path(folder) / f"questions-v{VERSION}-seed{seed}-{n_train}-{n_eval}-{size}px"
    if not target.is_dir():
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        for split, rows in zip(SPLITS, (n_train, n_eval)):
            _write_split(scratch, split, rows, seed, size)
        _publish(scratch, target)
    return EmbeddedTask(target, target / "train.jsonl", target / "test.jsonl")


def _publish(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(scratch)  # another process was first; its bytes are the same


def _write_split(folder: Path, split: str, rows: int, seed: int, size: int) -> None:
    (folder / "images" / split).mkdir(parents=True)
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for index in range(rows):
            rng = random.Random(derive_seed(seed, "embedded", split, index))
            kind = _CYCLE[index % len(_CYCLE)]
            question, scenes, answer = make_question(kind, rng)
            names = [f"images/{split}/{index:06d}-{place}.png" for place in range(len(scenes))]
            for name, scene in zip(names, scenes):
                draw_scene(scene, size).save(folder / name)
            row = {"prompt": question, "images": names, "reference": answer, "label": kind}
            file.write(json.dumps(row) + "\n")


def make_question(kind: str, rng: random.Random) -> tuple[str, list[_Scene], str]:
    """A question of this kind, the scenes to draw for it, and its answer. Answers of a kind are equally likely."""
    question, answer = QUESTIONS[kind], rng.choice(ANSWERS[kind])
    if kind == "text":
        first = rng.randint(0, int(answer))
        return question.format(first, int(answer) - first), [], answer
    if kind == "comparison":
        counts = (3, 1) if answer == "first" else (1, 3)
        return question, [_random_scene(rng, count=count) for count in counts], answer
    if kind == "position":
        return question, [_placed_scene(rng, answer)], answer
    if kind == "shape":
        return question, [_large_scene(rng, answer)], answer
    fixed = {"count": int(answer)} if kind == "count" else {"colour": answer}
    return question, [_random_scene(rng, **fixed)], answer


def _random_scene(rng: random.Random, count: int | None = None, colour: str | None = None) -> _Scene:
    """One to three shapes in different quarters of the image, so that they never touch."""
    count = count or rng.randint(1, 3)
    quarters = rng.sample([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)], count)
    centres = tuple((x + rng.uniform(-0.07, 0.07), y + rng.uniform(-0.07, 0.07)) for x, y in quarters)
    return _Scene(centres, 0.16, colour or rng.choice(list(COLOURS)), rng.choice(SHAPES))


def _large_scene(rng: random.Random, shape: str) -> _Scene:
    """One large shape near the middle: outlines of small ones are beyond a model that is warmed up in a minute."""
    centre = (0.5 + rng.uniform(-0.05, 0.05), 0.5 + rng.uniform(-0.05, 0.05))
    return _Scene((centre,), rng.uniform(0.34, 0.42), rng.choice(list(COLOURS)), shape)


def _placed_scene(rng: random.Random, place: str) -> _Scene:
    x, y = {"left": (0.2, 0.5), "right": (0.8, 0.5), "top": (0.5, 0.2), "bottom": (0.5, 0.8)}[place]
    centre = (x + rng.uniform(-0.03, 0.03), y + rng.uniform(-0.03, 0.03))
    return _Scene((centre,), 0.16, rng.choice(list(COLOURS)), rng.choice(SHAPES))


def draw_scene(scene: _Scene, size: int) -> Image.Image:
    """The scene as an RGB image of size x size pixels."""
    image = Image.new("RGB", (size, size), BACKGROUND)
    draw = ImageDraw.Draw(image)
    fill, radius = COLOURS[scene.colour], scene.radius * size
    for x, y in ((cx * size, cy * size) for cx, cy in scene.centres):
        box = (x - radius, y - radius, x + radius, y + radius)
        if scene.shape == "circle":
            draw.ellipse(box, fill=fill)
        elif scene.shape == "square":
            draw.rectangle(box, fill=fill)
        else:
            draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
    return image


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word, digit and sign of the task; a tokenizer trained on them knows it all."""
    sums = [QUESTIONS["text"].format(a, b) for a in range(4) for b in range(4 - a)]
    questions = [text.replace("<image>", "") for kind, text in QUESTIONS.items() if kind != "text"]
    return [*questions, *sums, *(answer for answers in ANSWERS.values() for answer in answers)]


def supervised_pairs(
    jsonl: str | os.PathLike, *, seed: int, random_share: float = 0.6, epochs: int | None = None
) -> Iterator[SupervisedPair]:
    """Shuffled warm-up examples from a split's jsonl file, for `epochs` passes or without end.

    Each time a row comes up, its answer is replaced with probability `random_share` by one drawn from the answers of
    its kind (the right one included). That leaves a base with entropy, which RL can sharpen; a base trained on clean
    answers has no groups with different rewards. The draw depends on (seed, pass, place in the pass).
    """
    path = Path(jsonl)
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    epoch = 0
    while epochs is None or epoch < epochs:
        rng = random.Random(derive_seed(seed, "warm-up", epoch))
        for row in rng.sample(rows, len(rows)):
            noisy = rng.random() < random_share
            answer = rng.choice(ANSWERS[row["label"]]) if noisy else row["reference"]
            images = tuple(str(path.parent / name) for name in row["images"])
            yield SupervisedPair(row["prompt"], images, answer, row["label"])
        epoch += 1
