"""Scenes of the embedded questions with descriptions of them in words, such as "two small red rings".

They are what captioned images are for a real model: its eye learns from them what is in an image, and only little of
how questions are answered. Every look occurs in them, and no image of dev or test.
"""

import os
import random

from ..embedded.questions import COLOURS, SHAPES, Scene, draw_scenes, random_scene, single_scene
from ..embedded.task import EmbeddedTask, Question, TaskSource, build_task

VERSION = 1  # part of the folder's name and of every draw
PROMPT = "describe the image"
COUNTS = ("one", "two", "three")
SIZES = ("small", "large")


def build_descriptions(folder: str | os.PathLike, count: int = 2048) -> EmbeddedTask:
    """`count` described scenes on disk, as the demonstrations of a task; see `task.build_task`. folder: below which
    they are written, or found."""
    return build_task(SOURCE, folder, 0, 1, 0, 56, count)


def described(scene: Scene) -> str:
    """The scene in words."""
    count = len(scene.centres)
    size = SIZES[scene.radius > 0.3]
    return f"{COUNTS[count - 1]} {size} {scene.colour} {scene.shape}{'s' if count > 1 else ''}"


def _draw_description(row: int, split: str, rng: random.Random, size: int) -> Question:
    """A scene of one to three shapes, or of a large one, and its description."""
    scene = single_scene(rng, large=rng.random() < 0.7) if rng.random() < 0.5 else random_scene(rng)
    look = (scene.colour, scene.shape)
    return Question("description", PROMPT, [draw_scenes([scene], size)], described(scene), {look})


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word of the descriptions and of their prompt."""
    plurals = [f"{shape}s" for shape in SHAPES]
    return [PROMPT, " ".join([*COUNTS, *SIZES, *COLOURS, *SHAPES, *plurals])]


SOURCE = TaskSource(
    "descriptions",
    VERSION,
    _draw_description,
    "descriptions",
    vocabulary_texts,
)
