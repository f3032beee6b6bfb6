"""The kinds of run: the schema of each, and the preset of its embedded model."""

from __future__ import annotations

from dataclasses import dataclass

from .diffusion import DiffusionRunConfig
from .vl import RunConfig

DIFFUSION_PRESET = "embedded/${algorithm.diffusion_algorithm}"  # one file an algorithm


@dataclass(frozen=True)
class Root:
    """kind is the folder of its recipes below experiment/."""

    kind: str
    schema: type
    preset: str


ROOTS = (
    Root("vl", RunConfig, "embedded_vl"),
    Root("diffusion", DiffusionRunConfig, DIFFUSION_PRESET),
)
