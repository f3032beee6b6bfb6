"""The families of vision-language models, one adapter a file, found by model type or by processor.

A model type that is not listed is run as `VLMFamily` has it where it has a vision tower, and as text otherwise; padded
only.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from .base import VLMFamily
from .internvl import InternVL
from .llava import Llava
from .qwen import QwenVL
from .text import TextOnly

__all__ = ["FAMILIES", "VLMFamily", "family_of", "family_of_processor"]

FAMILIES: tuple[type[VLMFamily], ...] = (QwenVL, InternVL, Llava, TextOnly)


def family_of(config: PretrainedConfig) -> VLMFamily:
    """The adapter for a transformers configuration."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family(config)
    return (VLMFamily if "vision_config" in config.to_dict() else TextOnly)(config)


def family_of_processor(processor: Any) -> type[VLMFamily]:
    """The adapter's class for a transformers processor; None is a text-only model's."""
    if processor is None:
        return TextOnly
    name = type(processor).__name__
    return next((family for family in FAMILIES if name in family.processors), VLMFamily)
