"""Diffusion families by the class name of their diffusers pipeline."""

from .base import DiffusionFamily
from .sd3 import StableDiffusion3

FAMILIES: dict[str, type[DiffusionFamily]] = {
    "StableDiffusion3Pipeline": StableDiffusion3,
}

__all__ = ["FAMILIES", "DiffusionFamily"]
