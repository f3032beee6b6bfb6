"""What kind of inputs a model takes, which of its tokens may never be sampled, and whether packing is proven for it."""

from __future__ import annotations

from enum import Enum

from transformers import PretrainedConfig

from ...errors import ConfigError


class ActorModality(Enum):
    """LANGUAGE_ONLY models read text; VISION_LANGUAGE models also read images and videos."""

    LANGUAGE_ONLY = "language_only"
    VISION_LANGUAGE = "vision_language"


# Packed rows equal single ones on these architectures: tests compare logits and gradients of each.
PACKING_PROVEN = ("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_VISION_TOKEN_FIELDS = (
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "image_token_index",
    "video_token_index", "boi_token_index", "eoi_token_index",
)  # fmt: skip


def get_modality(config: PretrainedConfig) -> ActorModality:
    """The modality of a transformers configuration: vision-language when it has a vision sub-configuration."""
    return ActorModality.VISION_LANGUAGE if "vision_config" in config.to_dict() else ActorModality.LANGUAGE_ONLY


def banned_token_ids(config: PretrainedConfig, tokenizer) -> list[int]:
    """Token ids that are never sampled and are masked out of the trainer's softmax alike, sorted.

    Vision tokens (a sampled placeholder has no features and kills the next forward) and the padding rows of the
    embedding matrix, which no text decodes to.
    """
    values = config.to_dict()
    vision = {values[name] for name in _VISION_TOKEN_FIELDS if isinstance(values.get(name), int)}
    if get_modality(config) is ActorModality.VISION_LANGUAGE:
        names = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
        vocabulary = tokenizer.get_vocab()
        vision |= {vocabulary[name] for name in names if name in vocabulary}
    unused = range(len(tokenizer), config.get_text_config().vocab_size)
    return sorted(vision | set(unused))


def require_packing(config: PretrainedConfig) -> None:
    """Raise ConfigError unless packed and single forwards are known to agree for this architecture."""
    if config.model_type not in PACKING_PROVEN:
        raise ConfigError(
            f"packing_samples is not proven for model type {config.model_type!r} "
            f"(proven: {', '.join(PACKING_PROVEN)}); train it padded, without --packing_samples"
        )
