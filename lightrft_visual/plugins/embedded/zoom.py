"""The embedded task that needs a closer look: what colour is a mark of three pixels?

    what colour is the mark?  <image>          56x56: a white plate somewhere, on ground that differs by quarter
    <tool_call>{"name": "zoom", "arguments": {"part": 2}}</tool_call>
    <image>                                    what is in the second quarter, from near: a red disc on the plate
    red

Scenes are drawn as maps are: at the size in which they are shown. The mark in the middle of the plate is left out where
it has less than LEAST_SEEN pixels. So the first image says where it is and nothing of its colour; without the tool,
answers are right by chance (1 of 4).

Demonstrations of this question look at quarters at random: they show the form of calls and answers, and nothing of
where to look, which the policy learns by rewards. As many ask other questions, which teach to see: what colour is it
(of a mark from near), and where is it (of a scene; the answer is the quarter's number). Splits: see `task`.
"""

import random
from typing import Any

from PIL import Image, ImageDraw

from ...rollout.environments import ToolCall
from ...rollout.tool_calls import render_tool_call
from ...rollout.tools import ToolEnvironment
from .questions import COLOURS
from .task import Question, TaskSource

VERSION = 4
QUESTION = "what colour is the mark?"
OF_SEEN, OF_PLACE = "what colour is it?", "where is it?"  # of demonstrations
SIDE = 56  # pixels of a scene as it is shown
PLATE, MARK = 16.0, 3.0  # pixels of their diameters there
PLATE_COLOUR = (255, 255, 255)
GROUNDS = ((0, 0, 0), (120, 60, 0), (0, 90, 110), (110, 0, 110))  # of the quarters, so that one tells them apart
LEAST_SEEN = 5.0  # pixels of a mark that is drawn
SCALE = 12  # of a closer look
SHIFT = 4.0  # pixels that a plate is off the middle of its quarter at most
LOOKS_AGAIN = 0.25  # of demonstrations that have not found it at once: another look follows
HALF = SIDE // 2
QUARTERS = ((0, 0), (HALF, 0), (0, HALF), (HALF, HALF))  # their upper left corners


class EmbeddedZoom(ToolEnvironment):
    """Enlarges a quarter of the row's `scene`, which is drawn anew at that size."""

    def __init__(self) -> None:
        super().__init__([self.zoom])

    def zoom(self, part: int) -> Image.Image:
        """Look closer at a quarter of the image.

        Args:
            part: 1 to 4, from the upper left to the lower right
        """
        if not 1 <= part <= len(QUARTERS):
            raise ValueError(f"there is no part {part}; there are 1 to {len(QUARTERS)}")
        return self.shown(part)

    def shown(self, part: int) -> Image.Image:
        """What the tool gives back."""
        return closer(self.row["scene"], part)


def draw_scene(scene: dict[str, Any]) -> Image.Image:
    """The whole scene."""
    return _draw(scene, (0, 0), 1)


def _draw(scene: dict[str, Any], corner: tuple[float, float], scale: int) -> Image.Image:
    """SIDE x SIDE pixels of the scene from a corner on, `scale` times as large."""
    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    for ground, place in zip(GROUNDS, QUARTERS):
        left, top = (scale * (edge - start) for edge, start in zip(place, corner))
        draw.rectangle((left, top, left + scale * HALF - 1, top + scale * HALF - 1), fill=ground)
    x, y = (scale * (scene[axis] - start) for axis, start in zip("xy", corner))
    for diameter, fill in ((PLATE * scale, PLATE_COLOUR), (MARK * scale, COLOURS[scene["colour"]])):
        radius = diameter / 2
        if diameter >= LEAST_SEEN:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    return image


def closer(scene: dict[str, Any], part: int) -> Image.Image:
    """What is in a quarter of the scene, counted from 1, from near: the middle of the plate, or nothing."""
    found = part == part_of(scene)
    middle = (scene["x"], scene["y"]) if found else [start + HALF / 2 for start in QUARTERS[part - 1]]
    return _draw(scene, tuple(each - SIDE / SCALE / 2 for each in middle), SCALE)


def _draw_question(row: int, split: str, rng: random.Random, size: int) -> Question:
    """Of demonstrations half ask something else."""
    makes = (_unseen, _seen, _unseen, _placed)
    return (makes[row % len(makes)] if split == "demonstrations" else _unseen)(rng)


def _unseen(rng: random.Random) -> Question:
    """A mark that is too small."""
    scene = make_scene(rng)
    turns = demonstration(scene, rng)
    return Question("mark", QUESTION, [draw_scene(scene)], scene["colour"], turns=turns, columns={"scene": scene})


def _seen(rng: random.Random) -> Question:
    """A mark as a closer look shows it."""
    scene = make_scene(rng)
    return Question("seen", OF_SEEN, [closer(scene, part_of(scene))], scene["colour"])


def _placed(rng: random.Random) -> Question:
    """Where the plate is."""
    scene = make_scene(rng)
    return Question("placed", OF_PLACE, [draw_scene(scene)], str(part_of(scene)))


def make_scene(rng: random.Random) -> dict[str, Any]:
    """A mark of any colour, its plate near the middle of any quarter."""
    x, y = (corner + HALF / 2 + rng.uniform(-SHIFT, SHIFT) for corner in rng.choice(QUARTERS))
    return {"x": round(x, 2), "y": round(y, 2), "colour": rng.choice(list(COLOURS))}


def part_of(scene: dict[str, Any]) -> int:
    """The quarter that the mark is in, counted from 1."""
    return 1 + int(scene["x"] >= HALF) + 2 * int(scene["y"] >= HALF)


def demonstration(scene: dict[str, Any], rng: random.Random) -> list[tuple[str, str | Image.Image]]:
    """Turns behind the question: looks at quarters at random, then the answer; a guess where the mark was not seen."""
    looks = rng.sample(range(1, len(QUARTERS) + 1), 2 if rng.random() < LOOKS_AGAIN else 1)
    turns: list[tuple[str, str | Image.Image]] = []
    for part in looks:
        turns += [("assistant", call_text(part)), ("tool", closer(scene, part))]
        if part == part_of(scene):
            return [*turns, ("assistant", scene["colour"])]
    return [*turns, ("assistant", rng.choice(list(COLOURS)))]


def call_text(part: int) -> str:
    """A call of the tool, in few tokens."""
    return render_tool_call(ToolCall("zoom", {"part": part})).replace("\n", "")


def vocabulary_texts() -> list[str]:
    """Texts that together hold every word, number and sign of the task; a tokenizer trained on them knows it all."""
    calls = [call_text(part).replace("<tool_call>", "").replace("</tool_call>", "") for part in range(1, 5)]
    return [QUESTION, OF_SEEN, OF_PLACE, *"1234", " ".join(["", *COLOURS]), *COLOURS, *calls, "zoom part"]


SOURCE = TaskSource(
    "zoom",
    VERSION,
    _draw_question,
    "embedded zoom",
    vocabulary_texts,
    {"until_loss": 0.0, "max_steps": 150, "per_response": True},
    EmbeddedZoom,
)
