"""The families of vision-language models, one adapter a file, found in the registry by model type or by processor.

A model type that is not registered is run by `Unregistered` where it has a vision tower, and as text otherwise, and
refused where that would be wrong (`unregistered.py`).
"""

from typing import Any

from transformers import PretrainedConfig

from ....config.registry import vlm_families
from .base import VLMFamily
from .text import TextOnly
from .unregistered import Unregistered, check_class, check_text

__all__ = ["VLMFamily", "family_of", "family_of_processor"]


def family_of(config: PretrainedConfig) -> VLMFamily:
    """The adapter for a transformers configuration; of several for a model type, the one registered last.

    Raises ConfigError for a type without one that is no language model, or that the plain adapter would run wrong.
    """
    entry = next((each for each in reversed([*vlm_families]) if config.model_type in each.model_types), None)
    if entry is not None:
        return entry.load()(config)
    vision = "vision_config" in config.to_dict()
    check_class(config, vision)
    if vision:
        return Unregistered(config)
    check_text(config)
    return TextOnly(config)


def family_of_processor(processor: Any) -> type[VLMFamily]:
    """The adapter's class for a transformers processor; None is a text-only model's."""
    if processor is None:
        return TextOnly
    name = type(processor).__name__
    entry = next((each for each in reversed([*vlm_families]) if name in each.processors), None)
    return Unregistered if entry is None else entry.load()
