"""The embedded task whose answer is a point: a screen with four buttons, one of which is asked for.

    click on red  <image>                                56x56, a button in each quarter
    <tool_call>{"name": "click", "arguments": {"x": 42, "y": 14}}</tool_call>

The environment is `click` (`rollout/builtin/click.py`): a point inside the button is rewarded. Demonstrations show the
form of calls, on buttons at random, and what colour is seen at a point; which button is meant is learnt by rewards.
Splits: see `task`.
"""

from __future__ import annotations

import random

from PIL import Image, ImageDraw

from ...rollout.builtin.click import Click
from ...rollout.environments import ToolCall
from ...rollout.tools import render_tool_call
from ...runtime.seeding import derive_seed
from .questions import BACKGROUND, COLOURS
from .task import Question, TaskSource, belongs

VERSION = 1
SIDE, QUARTER = 56, 28
LEAST_HALF, MOST_HALF = 7.0, 9.0  # pixels: half of a button's side
SHIFT = 3.0  # pixels that a button is off the middle of its quarter at most


def draw_question(row: int, split: str, rng: random.Random) -> Question:
    """A question that belongs to the split: drawn again until it does."""
    make = _seen if split == "demonstrations" and row % 2 else _button
    while True:
        question = make(rng)
        if belongs(question, split):
            return question


def _button(rng: random.Random) -> Question:
    """Which button is asked for; its demonstration clicks on any."""
    buttons, colour = make_buttons(rng), rng.choice(list(COLOURS))
    columns = {"target": [round(each, 1) for each in buttons[colour]]}
    turns = [("assistant", call_text(*middle_of(buttons[rng.choice(list(COLOURS))])))]
    return Question("button", f"click on {colour}", [draw_screen(buttons)], colour, turns=turns, columns=columns)


def _seen(rng: random.Random) -> Question:
    """What is at a point."""
    buttons, colour = make_buttons(rng), rng.choice(list(COLOURS))
    x, y = middle_of(buttons[colour])
    return Question("seen", f"what is at {x} {y}", [draw_screen(buttons)], colour)


def make_buttons(rng: random.Random) -> dict[str, list[float]]:
    """The box of the button of each colour, in quarters at random."""
    corners = [(x, y) for y in (0, QUARTER) for x in (0, QUARTER)]
    boxes = {}
    for colour, corner in zip(rng.sample(list(COLOURS), len(COLOURS)), corners):
        x, y = (start + QUARTER / 2 + rng.uniform(-SHIFT, SHIFT) for start in corner)
        half = rng.uniform(LEAST_HALF, MOST_HALF)
        boxes[colour] = [x - half, y - half, x + half, y + half]
    return boxes


def middle_of(box: list[float]) -> tuple[int, int]:
    """A point of the button: the middle of its quarter, which is inside whatever its place is."""
    return tuple(int(each // QUARTER) * QUARTER + QUARTER // 2 for each in box[:2])


def draw_screen(buttons: dict[str, list[float]]) -> Image.Image:
    """The buttons in their colours."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    for colour, box in buttons.items():
        ImageDraw.Draw(image).rectangle(box, fill=COLOURS[colour])
    return image


def call_text(x: int, y: int) -> str:
    """A call of the tool, in few tokens."""
    return render_tool_call(ToolCall("click", {"x": x, "y": y})).replace("\n", "")


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word, number and sign of the task; a tokenizer trained on them knows it all."""
    calls = [call_text(x, y).replace("<tool_call>", "").replace("</tool_call>", "") for x in (14, 42) for y in (14, 42)]
    return [*(f"click on {colour}" for colour in COLOURS), *COLOURS, *calls, "what is at 14 42", "click x y"]


SOURCE = TaskSource(
    "click",
    VERSION,
    lambda row, split, rng, size: draw_question(row, split, rng),
    lambda seed, split, row: derive_seed(seed, "embedded click", VERSION, split, row),
    vocabulary_texts,
    {"until_loss": 0.0, "max_steps": 300, "per_response": True},
    Click,
)
