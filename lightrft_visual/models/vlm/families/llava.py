"""LLaVA 1.5, and Pixtral in the same class: images of one size, or of any with their sizes beside them."""

from collections.abc import Mapping

from .base import T, VLMFamily
from .unregistered import Unregistered


class Llava(Unregistered):
    """As `Unregistered` has it, whose texts it may be around."""

    packed = ("llava",)

    def feature_count(self, sample: Mapping[str, T]) -> int | None:
        """Known where all images have one size."""
        return None if "image_sizes" in sample else VLMFamily.feature_count(self, sample)
