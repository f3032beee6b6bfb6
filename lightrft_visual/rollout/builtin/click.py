"""Finding something on a screen: the answer is a point."""

import math
import re
from typing import Any

from PIL import Image, ImageDraw

from ...data.media import load_image
from ..environments import Action, ToolCall
from ..tool_calls import without_thoughts
from ..tools import ToolEnvironment
from .zoom import in_pixels

ARM = 0.06  # of the cross at a missed point, in shares of the shorter side
INK = (255, 0, 255)
NUMBER = r"-?(?:\d+\.?\d*|\.\d+)"
POINT = re.compile(rf"[(\[]\s*({NUMBER})\s*,\s*({NUMBER})\s*[)\]]")


class Click(ToolEnvironment):
    """The model clicks on the row's first image; a click inside its `target` is rewarded by 1 and ends the episode.

    target: left, top, right and bottom, in pixels of the image or, all from 0 to 1, in shares of its sides; the row's
    `reference` where there is no such column. The model calls the tool `click`, or writes a point such as (12, 30).
    After a miss it is shown the screen with a cross where it clicked. A response without a point ends the episode.
    """

    def __init__(self) -> None:
        super().__init__([self.click])

    def reset(self, row: dict[str, Any]) -> None:
        """Read the screen and the target. Raises ValueError for a row without them."""
        super().reset(row)
        self.screen = load_image((row.get("images") or [None])[0])
        target = row.get("target", row.get("reference"))
        numbers = [float(each) for each in re.findall(NUMBER, target)] if isinstance(target, str) else target
        if numbers is None or len(numbers) != 4:
            raise ValueError(f"the row's target is {target!r}; it is left, top, right, bottom")
        self.target = in_pixels(numbers, self.screen.size)
        self.hit = False

    def step(self, action: Action) -> tuple[Any, float, bool, dict[str, Any]]:
        """The screen with a cross where the model clicked; a reward of 1 and the end at a hit."""
        calls = action.tool_calls
        if not calls and (point := POINT.search(without_thoughts(action.text))):
            calls = [ToolCall("click", {"x": float(point[1]), "y": float(point[2])})]
        observation, _, done, info = super().step(Action(action.text, action.token_ids, calls[:1]))
        return (None, 1.0, True, info) if self.hit else (observation, 0.0, done, info)

    def click(self, x: float, y: float) -> Image.Image:
        """Click on a point of the screen.

        Args:
            x: from the left, in pixels, or from 0 to 1 in shares of the width
            y: from the top, in pixels, or from 0 to 1 in shares of the height
        """
        if not math.isfinite(x) or not math.isfinite(y):
            raise ValueError("a point has finite numbers")
        x, y = in_pixels([x, y], self.screen.size)
        left, top, right, bottom = self.target
        self.hit = left <= x <= right and top <= y <= bottom
        return _marked(self.screen, x, y)


def _marked(screen: Image.Image, x: float, y: float) -> Image.Image:
    """A copy of the screen with a cross at a point."""
    image, arm = screen.convert("RGB"), max(2.0, ARM * min(screen.size))
    draw = ImageDraw.Draw(image)
    for across in ((arm, 0.0), (0.0, arm)):
        draw.line([x - across[0], y - across[1], x + across[0], y + across[1]], fill=INK, width=1 + round(arm / 4))
    return image
