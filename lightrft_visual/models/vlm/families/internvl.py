"""InternVL (transformers' own port): images as one or more square tiles of a fixed number of tokens each.

A placeholder `<IMG_CONTEXT>` becomes `<img>`, the tiles' tokens and `</img>`. Images only: vLLM gives frames of videos
another token than the processor, so prompts with videos would not be scored as they were sampled.
"""

from torch import nn

from ..vision_cache import SharedMedia
from .base import VLMFamily


class InternVL(VLMFamily):
    """Ordinary positions over a language model of another family."""

    packed = ("internvl",)
    texts = ("qwen2", "qwen3", "qwen3_moe", "llama")
    towers = ("vision_tower",)
    kinds = ("image",)
    vision_tokens = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")

    def attach(self, base: nn.Module) -> None:
        """The tower runs once for each different tile."""
        SharedMedia(base.vision_tower)
