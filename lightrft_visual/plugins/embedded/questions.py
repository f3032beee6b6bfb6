"""The embedded visual question task: small drawn scenes on disk as PNG, questions as jsonl, in four splits.

It exists so that a run without any flag trains on real files through the same code as user data. A scene holds one to
three shapes of one colour. Kinds of questions, with their share in twentieths of the rows:

    count       6   how many shapes are there?                 1, 2, 3
    colour      4   what colour is it?                         red, green, blue, yellow
    shape       5   which shape is it?                         ring, square, triangle (one large shape)
    size        2   how large is it?                           small, large (one shape)
    two_images  1   what colour is the first?                  red, green, blue, yellow (another one in the second)
    text        2   red blue blue red which word is last?      red, green, blue, yellow (no image)

An answer is always one word or one digit. Shapes of the demonstrations have the looks of SHOWN_LOOKS only, those of the
other splits every look.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from ...runtime.files import write_atomic
from .task import Question, TaskSource

VERSION = 7  # part of the folder's name and of every draw: a change of the drawing must change it
BACKGROUND = (32, 32, 32)  # darker than every colour: what has the brightness of the ground is hard to see
COLOURS = {"red": (220, 30, 30), "green": (30, 160, 50), "blue": (50, 80, 230), "yellow": (235, 200, 20)}
SHAPES = ("ring", "square", "triangle")
ANSWERS: dict[str, tuple[str, ...]] = {
    "count": ("1", "2", "3"),
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "size": ("small", "large"),
    "two_images": tuple(COLOURS),
    "text": tuple(COLOURS),
}
QUESTIONS = {
    "count": "how many shapes are there?",
    "colour": "what colour is it?",
    "shape": "which shape is it?",
    "size": "how large is it?",
    "two_images": "first <image> second <image> what colour is the first?",
    "text": "{} {} {} {} which word is last?",
}
KINDS = tuple(ANSWERS)
# Colours and shapes that go together in demonstrations: two of three shapes for each colour.
SHOWN_LOOKS = {
    (colour, shape) for i, colour in enumerate(COLOURS) for j, shape in enumerate(SHAPES) if (i + j) % len(SHAPES) != 2
}
_SHARES = {"count": 6, "colour": 4, "shape": 5, "size": 2, "two_images": 1, "text": 2}
_CYCLE = tuple(kind for kind in KINDS for _ in range(_SHARES[kind]))


@dataclass(frozen=True)
class Scene:
    """What is drawn: centres and one radius in units of the image's side, a colour's and a shape's name."""

    centres: tuple[tuple[float, float], ...]
    radius: float
    colour: str
    shape: str


def text_questions(split: Path) -> Path:
    """A split's questions without images, for models of text alone: a file beside it that is written once."""
    target = split.with_suffix(".text.jsonl")
    if not target.is_file():
        rows = [line for line in split.read_text(encoding="utf-8").splitlines(True) if not json.loads(line)["images"]]
        write_atomic(target, "".join(rows))
    return target


def draw_question(kind: str, split: str, rng: random.Random, size: int) -> Question:
    """A question of this kind.

    Args:
        kind: one of KINDS.
        split: that it is for; of demonstrations it has looks that they show.
        rng: of all that is drawn.
        size: pixels of an image's side.
    """
    while True:
        prompt, scenes, answer = make_question(kind, rng)
        looks = {(scene.colour, scene.shape) for scene in scenes}
        if split != "demonstrations" or looks <= SHOWN_LOOKS:
            return Question(kind, prompt, [draw_scenes([scene], size) for scene in scenes], answer, looks)


def make_question(kind: str, rng: random.Random) -> tuple[str, list[Scene], str]:
    """A question of this kind, the scenes to draw for it, and its answer. Answers of a kind are equally likely."""
    question, answer = QUESTIONS[kind], rng.choice(ANSWERS[kind])
    if kind == "text":
        return question.format(*(rng.choice(ANSWERS[kind]) for _ in range(3)), answer), [], answer
    if kind == "two_images":
        other = rng.choice([colour for colour in COLOURS if colour != answer])
        return question, [random_scene(rng, colour=colour) for colour in (answer, other)], answer
    if kind == "size":
        return question, [single_scene(rng, large=answer == "large")], answer
    if kind == "shape":
        return question, [single_scene(rng, large=True, shape=answer)], answer
    fixed = {"count": int(answer)} if kind == "count" else {"colour": answer}
    return question, [random_scene(rng, **fixed)], answer


def random_scene(rng: random.Random, count: int | None = None, colour: str | None = None) -> Scene:
    """Shapes in different quarters of the image, so that they never touch.

    Args:
        rng: of all that is not given.
        count: of shapes; None: one to three.
        colour: a name in COLOURS; None: any.
    """
    count = count or rng.randint(1, 3)
    quarters = rng.sample([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)], count)
    centres = tuple((x + rng.uniform(-0.07, 0.07), y + rng.uniform(-0.07, 0.07)) for x, y in quarters)
    return Scene(centres, 0.16, colour or rng.choice(list(COLOURS)), rng.choice(SHAPES))


def single_scene(rng: random.Random, large: bool, shape: str | None = None) -> Scene:
    """One shape near the middle.

    Args:
        rng: of all that is not given.
        large: outlines of small ones are beyond a model that is trained for minutes.
        shape: one of SHAPES; None: any.
    """
    centre = (0.5 + rng.uniform(-0.05, 0.05), 0.5 + rng.uniform(-0.05, 0.05))
    radius = rng.uniform(0.34, 0.42) if large else rng.uniform(0.12, 0.2)
    return Scene((centre,), radius, rng.choice(list(COLOURS)), shape or rng.choice(SHAPES))


def draw_scenes(scenes: list[Scene], size: int) -> Image.Image:
    """Scenes over each other in one RGB image of size x size pixels."""
    image = Image.new("RGB", (size, size), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for scene in scenes:
        _draw(scene, draw, size)
    return image


def _draw(scene: Scene, draw: ImageDraw.ImageDraw, size: int) -> None:
    fill, radius = COLOURS[scene.colour], scene.radius * size
    for x, y in ((cx * size, cy * size) for cx, cy in scene.centres):
        box = (x - radius, y - radius, x + radius, y + radius)
        if scene.shape == "ring":
            draw.ellipse(box, outline=fill, width=round(0.4 * radius))
        elif scene.shape == "square":
            draw.rectangle(box, fill=fill)
        else:
            draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word, digit and sign of the task; a tokenizer trained on them knows it all."""
    lists = [QUESTIONS["text"].format(*COLOURS)]
    questions = [text.replace("<image>", "") for kind, text in QUESTIONS.items() if kind != "text"]
    return [*questions, *lists, *(answer for answers in ANSWERS.values() for answer in answers)]


SOURCE = TaskSource(
    "questions",
    VERSION,
    lambda row, split, rng, size: draw_question(_CYCLE[row % len(_CYCLE)], split, rng, size),
    "embedded",
    vocabulary_texts,
)
