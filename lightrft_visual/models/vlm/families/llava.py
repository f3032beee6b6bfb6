"""LLaVA 1.5: one square image a placeholder, a fixed number of tokens each, ordinary positions."""

from __future__ import annotations

from .base import VLMFamily


class Llava(VLMFamily):
    """As `VLMFamily` has it. Packing is not shown."""

    kinds = ("image",)
