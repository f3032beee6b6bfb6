"""Drawn shapes with captions: the images that the embedded diffusion model learns, and the templates of its scorer.

Everything is a differentiable function of tensors: an image is rendered from signed distances (negative inside), so
the same code draws training images, fits templates in `shape_match.py` and gives Reward FL a gradient.
Coordinates are in units of the image's side: x to the right, y down, both in 0..1.
"""

import math
from dataclasses import dataclass, replace

import torch

T = torch.Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.95, 0.85, 0.1),
    "purple": (0.6, 0.1, 0.7),
    "black": (0.05, 0.05, 0.05),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
PLACED_AREA, PLACED_SHIFT = 0.75, 0.125  # of shapes at a place: share of the usual area, distance from the middle
BACKGROUND = 0.95  # grey level of every drawn background


@dataclass(frozen=True)
class ShapeCaption:
    """What a caption such as 'a red circle' asks for: indices into COLOURS, SHAPES and, where it names one, PLACES."""

    colour: int
    shape: int
    place: int | None = None

    @property
    def text(self) -> str:
        """The caption, such as `a red circle` or `a red circle at the top left`."""
        text = f"a {list(COLOURS)[self.colour]} {SHAPES[self.shape]}"
        return text if self.place is None else f"{text} at the {PLACES[self.place]}"


def all_captions() -> list[ShapeCaption]:
    """Every colour with every shape, colour-major."""
    return [ShapeCaption(colour, shape) for colour in range(len(COLOURS)) for shape in range(len(SHAPES))]


def placed_captions() -> list[ShapeCaption]:
    """Every colour with every shape at every place."""
    return [replace(caption, place=place) for caption in all_captions() for place in range(len(PLACES))]


def held_out(caption: ShapeCaption, split: str = "test") -> bool:
    """Whether a caption is for evaluation only; its words are trained on in others.

    One shape of each colour; of captions with a place one place of each colour and shape, so that every two of their
    three words are trained on together. split: 'test', or 'dev', which holds out others, for tuning.
    """
    first = 1 if split == "test" else 2
    if caption.place is not None:
        return caption.place == (caption.colour + caption.shape + first + caption.colour // len(SHAPES)) % len(PLACES)
    return caption.shape == (caption.colour + first + caption.colour // len(SHAPES)) % len(SHAPES)


def parse_caption(text: str) -> ShapeCaption | None:
    """The first colour and shape named in the text, with the place where one is; None without colour or shape."""
    words = [word.strip(".,!?'\"") for word in text.lower().split()]
    colours = [list(COLOURS).index(word) for word in words if word in COLOURS]
    shapes = [SHAPES.index(word) for word in words if word in SHAPES]
    places = [PLACES.index(" ".join(two)) for two in zip(words, words[1:]) if " ".join(two) in PLACES]
    return ShapeCaption(colours[0], shapes[0], places[0] if places else None) if colours and shapes else None


def colour_table(reference: T) -> T:
    """(n_colours, 3) in the dtype and on the device of `reference`."""
    return torch.tensor(list(COLOURS.values()), dtype=reference.dtype, device=reference.device)


def _signed_distances(area: T, x: T, y: T, size: int) -> T:
    """(B, n_shapes, size, size): distance in pixels to the outline of each shape, negative inside.

    Arguments are as of `shape_masks`. All shapes of one row have the same area and centre, so that they differ in form
    only.
    """
    grid = (torch.arange(size, dtype=area.dtype, device=area.device) + 0.5) / size
    dx = grid.view(1, 1, size) - x.view(-1, 1, 1)
    dy = grid.view(1, size, 1) - y.view(-1, 1, 1)
    dx, dy = torch.broadcast_tensors(dx, dy)
    root = area.clamp_min(1e-6).sqrt().view(-1, 1, 1)
    circle = (dx.square() + dy.square() + 1e-12).sqrt() - root / math.sqrt(math.pi)
    square = torch.maximum(dx.abs(), dy.abs()) - root / 2
    inradius = root / math.sqrt(3 * math.sqrt(3))  # equilateral, one corner up, centroid in the middle
    triangle = torch.maximum(dy, dx.abs() * (math.sqrt(3) / 2) - dy / 2) - inradius
    arm = root * math.sqrt(9 / 20)  # a plus sign whose arms are three times as long as wide
    upright = torch.maximum(dx.abs() - arm / 3, dy.abs() - arm)
    lying = torch.maximum(dx.abs() - arm, dy.abs() - arm / 3)
    return torch.stack([circle, square, triangle, torch.minimum(upright, lying)], dim=1) * size


def shape_masks(area: T, x: T, y: T, size: int, softness: float = 1.0) -> T:
    """(B, n_shapes, size, size) in 0..1: coverage of each pixel by each shape.

    Args:
        area: (B), share of the image that the shape covers.
        x: (B), its centre of mass, in 0..1 from the left.
        y: (B), the same from the top.
        size: pixels of the image's side.
        softness: pixels that edges are wide.
    """
    return (0.5 - _signed_distances(area, x, y, size) / softness).clamp(0, 1)


def draw(colours: T, shapes: T, area: T, x: T, y: T, size: int) -> T:
    """Images (B, 3, size, size) in 0..1.

    Args:
        colours: (B) long, indices into COLOURS.
        shapes: (B) long, indices into SHAPES.
        area, x, y, size: as of `shape_masks`.
    """
    masks = shape_masks(area, x, y, size)
    mask = masks.gather(1, shapes.view(-1, 1, 1, 1).expand(-1, 1, size, size))
    ink = colour_table(area)[colours].view(-1, 3, 1, 1)
    return mask * ink + (1 - mask) * BACKGROUND


def random_images(
    colours: T, shapes: T, size: int, generator: torch.Generator, variety: float = 1.0, places: T | None = None
) -> T:
    """Images (B, 3, size, size) in 0..1 at random sizes and centres.

    Args:
        colours, shapes: as of `draw`.
        size: pixels of the image's side.
        generator: on the host, of areas and centres.
        variety: of these, 0 for the mean ones only.
        places: (B) long, indices into PLACES, around which the centres are; -1, or None for all: around the middle.
    """
    uniform = torch.rand(3, colours.shape[0], generator=generator)
    uniform = torch.lerp(torch.full_like(uniform, 0.5), uniform, variety)
    area = 0.12 + 0.16 * uniform[0]
    x, y = 0.5 + 0.16 * (uniform[1] - 0.5), 0.5 + 0.16 * (uniform[2] - 0.5)
    if places is not None:
        placed = places >= 0
        area = torch.where(placed, area * PLACED_AREA, area)
        x = x + placed * PLACED_SHIFT * (places % 2 * 2 - 1)
        y = y + placed * PLACED_SHIFT * (places // 2 * 2 - 1)
    return draw(colours, shapes, area, x, y, size)
