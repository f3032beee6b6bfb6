"""Described scenes: their words, their looks, and that no image of dev or test is among them."""

import json
import re
from itertools import product

import pytest
from PIL import Image

from lightrft_visual.plugins.embedded.questions import COLOURS, SHAPES, Scene
from lightrft_visual.plugins.embedded.task import split_of
from lightrft_visual.plugins.unified.descriptions import (
    COUNTS,
    PROMPT,
    build_descriptions,
    described,
    vocabulary_texts,
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    task = build_descriptions(tmp_path_factory.mktemp("descriptions"), 96)
    with open(task.demonstrations, encoding="utf-8") as file:
        return [(json.loads(line), task.folder) for line in file]


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (Scene(((0.5, 0.5),), 0.4, "red", "ring"), "one large red ring"),
        (Scene(((0.5, 0.5),), 0.12, "blue", "square"), "one small blue square"),
        (Scene(((0.2, 0.2), (0.7, 0.7)), 0.16, "green", "triangle"), "two small green triangles"),
        (Scene(((0.2, 0.2), (0.7, 0.7), (0.2, 0.7)), 0.16, "yellow", "ring"), "three small yellow rings"),
    ],
)
def test_a_scene_is_said_in_words(scene, text):
    assert described(scene) == text


def test_descriptions_say_what_their_images_show(scenes):
    areas: dict[str, list[float]] = {}
    for row, folder in scenes:
        count, size, colour, shape = re.fullmatch(r"(\w+) (small|large) (\w+) (\w+?)s?", row["reference"]).groups()
        assert row["prompt"] == PROMPT and row["label"] == "description" and shape in SHAPES
        image = Image.open(folder / row["images"][0]).convert("RGB")
        pixels = list(image.getdata())
        drawn = [pixel for pixel in pixels if pixel == COLOURS[colour]]
        assert {pixel for pixel in pixels if pixel in COLOURS.values()} == {COLOURS[colour]}
        if shape == "square" and size == "small":
            areas.setdefault(count, []).append(len(drawn))
    assert set(areas) <= set(COUNTS) and min(areas["three"]) > max(areas["one"])


def test_every_look_occurs_and_no_image_of_what_is_held_out(scenes):
    looks = {tuple(row["reference"].removesuffix("s").split()[2:]) for row, _ in scenes}
    assert looks == set(product(COLOURS, SHAPES))
    for row, folder in scenes:
        assert split_of(Image.open(folder / row["images"][0]).tobytes()) == "demonstrations"


def test_the_vocabulary_holds_every_word(scenes):
    words = {word for text in vocabulary_texts() for word in text.split()}
    assert all(set(f"{row['prompt']} {row['reference']}".split()) <= words for row, _ in scenes)
