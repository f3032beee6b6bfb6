"""LLaVA 1.5, and Pixtral in the same class: images of one size, or of any with their sizes beside them."""

from __future__ import annotations

from .unregistered import Unregistered


class Llava(Unregistered):
    """As `Unregistered` has it, whose texts it may be around."""

    packed = ("llava",)
