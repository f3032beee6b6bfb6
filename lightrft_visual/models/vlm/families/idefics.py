"""Idefics 2 and 3, SmolVLM: images cut into tiles, with a mask of the pixels that are real."""

from typing import Any

from ....experience.types import ModelInputs
from .base import T
from .unregistered import Unregistered


class Idefics(Unregistered):
    """pixel_values (tiles, C, H, W) and pixel_attention_mask (tiles, H, W); the model takes a batch of one sample."""

    tensors = ("pixel_values", "pixel_attention_mask")
    packed = ("idefics3", "smolvlm")
    texts = ("llama",)

    @classmethod
    def images_first(cls, tensors: dict[str, T]) -> dict[str, T]:
        """Without the axis of samples."""
        return {name: value[0] for name, value in tensors.items()}

    def arguments(self, inputs: ModelInputs, types: T) -> dict[str, Any]:
        """All tiles as those of one sample: the model joins samples, and leaves out tiles that are all zero."""
        return {name: value[None] for name, value in inputs.vision.joined().items()}
