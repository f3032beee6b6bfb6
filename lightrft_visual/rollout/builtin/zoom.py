"""Looking closer: a tool that cuts a region out of the prompt's image and enlarges it, as in DeepEyes."""

import math

from PIL import Image

from ...data.media import load_image
from ..tools import ToolEnvironment

LEAST_SIDE = 28  # pixels of the result's shorter side: vision-language models take nothing smaller
MOST_ASPECT = 100  # the longer side over the shorter one: more is refused by processors of Qwen-VL


class Zoom(ToolEnvironment):
    """One tool, `zoom`, on the images of the row.

    Boxes count in pixels of the image as the row brings it, or from 0 to 1 in shares of its sides: where an image is
    larger than what the model is shown (`max_pixels`), only shares mean the same to both. A box that reaches out of the
    image is cut at its border. A box without an inside is answered by an error text.

    side: pixels of the result's longer side; None: as many as the image itself has.
    """

    def __init__(self, side: int | None = None) -> None:
        self.side = side
        super().__init__([self.zoom])

    def zoom(self, box: list[float], image: int = 1) -> Image.Image:
        """Look closer at a region of an image.

        Args:
            box: left, top, right and bottom of the region, in pixels, or all from 0 to 1 in shares of the image's sides
            image: which image, counted from 1
        """
        whole = self.image(image)
        region = whole.crop(pixel_box(box, whole.size))
        scale = max((self.side or max(whole.size)) / max(region.size), LEAST_SIDE / min(region.size))
        size = [max(LEAST_SIDE, round(length * scale)) for length in region.size]
        return region.resize(size, Image.Resampling.BICUBIC)

    def image(self, number: int) -> Image.Image:
        """An image of the row, counted from 1. Raises ValueError where there is none."""
        images = self.row.get("images") or []
        if not 1 <= number <= len(images):
            raise ValueError(f"there is no image {number}; there are {len(images)}")
        return load_image(images[number - 1])


def pixel_box(box: list[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box in whole pixels inside an image of this size. Raises ValueError that says what is wrong with it."""
    if len(box) != 4:
        raise ValueError(f"a box has four numbers, not {len(box)}")
    if not all(map(math.isfinite, box)):
        raise ValueError("a box has finite numbers")
    left, top, right, bottom = in_pixels(box, size)
    left, right = max(0, math.floor(left)), min(size[0], math.ceil(right))
    top, bottom = max(0, math.floor(top)), min(size[1], math.ceil(bottom))
    if left >= right or top >= bottom:
        raise ValueError(f"the box {box} has no inside in an image of {size[0]}x{size[1]} pixels")
    wide, high = right - left, bottom - top
    if max(wide, high) > MOST_ASPECT * min(wide, high):
        raise ValueError(f"the box {box} is more than {MOST_ASPECT} times as long as wide")
    return left, top, right, bottom


def in_pixels(numbers: list[float], size: tuple[int, int]) -> list[float]:
    """Coordinates in pixels: where all are from 0 to 1 they are shares of the sides."""
    shares = all(0 <= number <= 1 for number in numbers)
    return [number * size[i % 2] if shares else number for i, number in enumerate(numbers)]
