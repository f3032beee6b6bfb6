"""The embedded task whose answer is a point: a screen with four buttons, one of which is lit.

    click on the lit button  <image>                     56x56, a button in each quarter, on ground that differs
    <tool_call>{"name": "click", "arguments": {"x": 42, "y": 14}}</tool_call>

The environment is `click` (`rollout/builtin/click.py`): a point inside the button is rewarded. Demonstrations of this
question click on buttons at random: they show the form of calls. As many ask where the lit button is, and the answer is
two numbers; that calls are to be made there is learnt by rewards. Splits: see `task`.
"""

import random

from PIL import Image, ImageDraw

from ...rollout.builtin.click import Click
from ...rollout.environments import ToolCall
from ...rollout.tool_calls import render_tool_call
from .task import Question, TaskSource
from .zoom import GROUNDS, HALF, QUARTERS, SIDE

VERSION = 4
QUESTION, OF_PLACE = "click on the lit button", "where is the lit button?"  # the second of demonstrations
LIT, DIM = (255, 255, 255), (50, 50, 50)
LEAST_HALF, MOST_HALF = 7.0, 9.0  # pixels: half of a button's side
SHIFT = 3.0  # pixels that a button is off the middle of its quarter at most
Box = list[float]


def _draw_question(row: int, split: str, rng: random.Random, size: int) -> Question:
    """Which button is lit, its demonstration a click on any; of demonstrations every other one asks where it is."""
    buttons, lit = make_buttons(rng), rng.randrange(len(QUARTERS))
    image = draw_screen(buttons, lit)
    if split == "demonstrations" and row % 2:
        x, y = middle_of(buttons[lit])
        return Question("placed", OF_PLACE, [image], f"{x} {y}")
    turns = [("assistant", call_text(*middle_of(rng.choice(buttons))))]
    columns = {"target": [round(each, 1) for each in buttons[lit]]}
    return Question("button", QUESTION, [image], str(lit + 1), turns=turns, columns=columns)


def make_buttons(rng: random.Random) -> list[Box]:
    """The box of the button in each quarter."""
    boxes = []
    for corner in QUARTERS:
        x, y = (start + HALF / 2 + rng.uniform(-SHIFT, SHIFT) for start in corner)
        half = rng.uniform(LEAST_HALF, MOST_HALF)
        boxes.append([x - half, y - half, x + half, y + half])
    return boxes


def middle_of(box: Box) -> tuple[int, int]:
    """A point of the button: the middle of its quarter, which is inside whatever its place is."""
    x, y = (int(each // HALF) * HALF + HALF // 2 for each in box[:2])
    return x, y


def draw_screen(buttons: list[Box], lit: int) -> Image.Image:
    """The buttons on their grounds; lit: which one is, from 0."""
    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    for number, (ground, (left, top), box) in enumerate(zip(GROUNDS, QUARTERS, buttons)):
        draw.rectangle((left, top, left + HALF - 1, top + HALF - 1), fill=ground)
        draw.rectangle(box, fill=LIT if number == lit else DIM)
    return image


def call_text(x: int, y: int) -> str:
    """A call of the tool, in few tokens."""
    return render_tool_call(ToolCall("click", {"x": x, "y": y})).replace("\n", "")


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word, number and sign of the task; a tokenizer trained on them knows it all."""
    calls = [call_text(x, y).replace("<tool_call>", "").replace("</tool_call>", "") for x in (14, 42) for y in (14, 42)]
    return [QUESTION, OF_PLACE, *calls, "14 42", "click x y"]


SOURCE = TaskSource(
    "click",
    VERSION,
    _draw_question,
    "embedded click",
    vocabulary_texts,
    {"until_loss": 0.0, "max_steps": 150, "per_response": True},
    Click,
)
