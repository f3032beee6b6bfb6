"""Model types without an adapter of their own: run as `VLMFamily` has them, or refused by name.

The plain adapter counts ordinary positions and passes `pixel_values` alone. A model that needs more would be trained on
wrong log-probs, and engine hf, which runs the same forward, would agree with the trainer in the error. So what the
configuration, the model's class or the processor shows beyond that is a ConfigError, before any weights are loaded.
What does not show there, such as layers of other kinds, `models/vlm/probe.py` finds once they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    ProcessorMixin,
)

from ....config.registry import vlm_families
from ....errors import ConfigError
from .base import VLMFamily

_PASSED = {"input_ids", "attention_mask", "pixel_values"}  # of a processor's output
_FACTORS = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier",
            "output_multiplier")  # fmt: skip


class Unregistered(VLMFamily):
    """A vision-language model as `VLMFamily` has it. Raises ConfigError for one that it would run wrong."""

    def __init__(self, config: PretrainedConfig):
        _refuse(config, [*_of_text(config), *_of_vision(config)])
        super().__init__(config)

    def check_processor(self, processor: ProcessorMixin) -> None:
        """Raise ConfigError where the processor gives what the model's forward takes and the adapter does not pass."""
        classes = _classes(self.config)
        taken = {name for each in classes for name in inspect.signature(each.forward).parameters}
        given = set(processor.model_input_names) - _PASSED
        # A class from outside transformers is not there yet. Tokenizers name token types whether or not it takes them.
        extra = given & taken if classes else given - {"token_type_ids"}
        _refuse(self.config, [f"inputs of its processor: {', '.join(sorted(extra))}"] if extra else [])


def check_text(config: PretrainedConfig) -> None:
    """Raise ConfigError for a text-only model whose log-probs would be wrong."""
    _refuse(config, [*_of_text(config)])


def _refuse(config: PretrainedConfig, unknown: list[str]) -> None:
    if not unknown:
        return
    known = sorted({model_type for family in vlm_families for model_type in family.model_types})
    raise ConfigError(
        f"model type {config.model_type!r} has no adapter of its own, and has what the plain one does not know: "
        f"{'; '.join(unknown)}. Its log-probs would be wrong. Model types with an adapter: {', '.join(known)}. Others "
        "work with ordinary positions, full attention and pixel_values as their one input of images"
    )


def _of_text(config: PretrainedConfig) -> Iterator[str]:
    """Log-probs are made of the head's weights alone: what models do to its logits afterwards is left out."""
    values = config.get_text_config().to_dict()
    for name in _FACTORS:
        if values.get(name) not in (None, 1):
            yield f"logits that are scaled or capped after the head ({name} {values[name]})"


def _of_vision(config: PretrainedConfig) -> Iterator[str]:
    values, text = config.to_dict(), config.get_text_config().to_dict()
    classes = _classes(config)
    taken = {name for each in classes for name in inspect.signature(each.forward).parameters}
    if _has_mrope(values) or any(hasattr(each, "get_rope_index") for each in classes):
        yield "M-RoPE positions"
    if text.get("use_bidirectional_attention") or "token_type_ids" in taken:
        yield "bidirectional attention over images (token_type_ids)"
    if text.get("cross_attention_layers") or values.get("cross_layer_interval"):
        yield "cross-attention to images"
    if values.get("is_encoder_decoder"):
        yield "an encoder beside the decoder"


def _has_mrope(values: Any) -> bool:
    """Whether settings at any level ask for M-RoPE."""
    if isinstance(values, dict):
        named = any(str(name).startswith("mrope") and value for name, value in values.items())
        return named or "mrope" in (values.get("type"), values.get("rope_type")) or _has_mrope([*values.values()])
    return isinstance(values, (list, tuple)) and any(_has_mrope(value) for value in values)


def _classes(config: PretrainedConfig) -> list[type]:
    """The model's classes, with and without its head, where they are transformers' own."""
    found = [each[type(config)] for each in (MODEL_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
             if type(config) in each]  # fmt: skip
    return [each for entry in found for each in (entry if isinstance(entry, tuple) else (entry,))]
