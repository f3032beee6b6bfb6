"""How well an image compresses (DDPO, arXiv 2305.13301)."""

from typing import Any

from ...data.media import encoded
from ...errors import ConfigError
from .image_scoring import mean_over_frames


def jpeg_kilobytes(image: Any, quality: int) -> float:
    """Size of the image as JPEG, in units of 1000 bytes."""
    return len(encoded(image.convert("RGB"), "JPEG", quality=quality)) / 1000


class Incompressibility:
    """JPEG size in kilobytes divided by `divide_by`; a video's is the mean over its frames."""

    sign = 1.0

    def __init__(self, quality: int = 95, divide_by: float = 1.0) -> None:
        if not 1 <= quality <= 100 or divide_by <= 0:
            raise ConfigError("jpeg: quality lies in 1..100 and divide_by is positive")
        self.quality, self.divide_by = quality, divide_by

    def __call__(self, frames: list[list[Any]]) -> list[float | None]:
        factor = self.sign / self.divide_by
        return mean_over_frames(
            frames, [""] * len(frames), lambda images, _: [factor * jpeg_kilobytes(p, self.quality) for p in images]
        )


class Compressibility(Incompressibility):
    """Minus the JPEG size in kilobytes divided by `divide_by`."""

    sign = -1.0
