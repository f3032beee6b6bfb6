"""Human Preference Score v2 (Wu et al., arXiv 2306.09341)."""

from __future__ import annotations

from functools import partial
from typing import Any

from .clip_model import CLIPPairs
from .image_scoring import mean_over_frames


class HPSv2:
    """Cosine of image and prompt by the HPSv2 weights. model: a folder or hub name with them in transformers' CLIP
    form (ViT-H/14); the published file is in open_clip's form and needs converting first."""

    def __init__(self, model: str, processor: str | None = None, batch_size: int = 16, offload: bool = True) -> None:
        self._clip = CLIPPairs(model, processor, "hpsv2", batch_size, offload)

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        return mean_over_frames(frames, prompts, partial(self._clip.cosine, device=device))
