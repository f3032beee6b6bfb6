"""MiniCPM-V 4.6: images of any size cut into slices, whose patches lie behind each other in one strip."""

from typing import Any

from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

from ....errors import ConfigError
from ....experience.types import ModelInputs
from .base import T
from .unregistered import Unregistered


class MiniCPM(Unregistered):
    """pixel_values (patches, C, H, W), of all slices, and target_sizes (slices, 2). Its text is Qwen3.5's."""

    tensors = ("pixel_values", "target_sizes")
    packed = ("minicpmv4_6",)
    texts = ("qwen3_5_text",)

    def attach(self, base: nn.Module) -> None:
        """Raise ConfigError for divided weights: the merger runs once an image, and ranks would wait for each other."""
        if is_zero_param(next(base.parameters())):
            raise ConfigError(
                "zero_stage 3: MiniCPM-V merges images one by one, and ranks with different numbers of them would wait "
                "for each other; use zero_stage 2"
            )

    @classmethod
    def images_first(cls, tensors: dict[str, T]) -> dict[str, T]:
        """The patches of the strip first."""
        if "pixel_values" in tensors:
            strip = tensors["pixel_values"][0]
            tensors["pixel_values"] = strip.unflatten(-1, (-1, strip.shape[-2])).movedim(2, 0).contiguous()
        return tensors

    def arguments(self, inputs: ModelInputs, types: T) -> dict[str, Any]:
        """The strip as the processor made it."""
        arguments = super().arguments(inputs, types)
        if "pixel_values" in arguments:
            arguments["pixel_values"] = arguments["pixel_values"].movedim(0, 2).flatten(2)[None]
        return arguments
