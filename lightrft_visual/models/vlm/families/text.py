"""Causal language models without vision."""

from .base import VLMFamily


class TextOnly(VLMFamily):
    """Any model of `AutoModelForCausalLM`; packing is shown for the listed ones."""

    packed = ("qwen2", "qwen3")
    vision = False
    kinds = ()
    towers = ()
    tensors = ()
    media = {}

    @classmethod
    def processor_arguments(cls, min_pixels: int | None, max_pixels: int | None) -> dict:
        """None: there is no processor, and bounds on images say nothing."""
        return {}
