"""Environments of learning.py, by path: the tool of the embedded zoom task, without what it is for."""

import random

from PIL import Image

from lightrft_visual.plugins.embedded.questions import COLOURS
from lightrft_visual.plugins.embedded.zoom import EmbeddedZoom, closer, draw_scene


class EmbeddedZoomOfAnother(EmbeddedZoom):
    """For measuring: the enlarged mark has a colour that has nothing to do with the answer."""

    def shown(self, part: int) -> Image.Image:
        """The quarter, with a colour drawn from the row's seed."""
        colour = random.Random(self.row["seed"]).choice(list(COLOURS))
        return closer(self.row["scene"] | {"colour": colour}, part)


class EmbeddedZoomOfNothing(EmbeddedZoom):
    """For measuring: the tool gives back the image as it was."""

    def shown(self, part: int) -> Image.Image:
        """The whole scene."""
        return draw_scene(self.row["scene"])
