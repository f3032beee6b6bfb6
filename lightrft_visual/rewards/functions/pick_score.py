"""PickScore (Kirstain et al., arXiv 2305.01569)."""

from __future__ import annotations

from typing import Any

from .clip_model import CLIPPairs
from .image_scoring import mean_over_frames


class PickScore:
    """Logit scale times the cosine of image and prompt, divided by `divide_by`: 26 brings it near 0..1, as
    Flow-GRPO does; 1 gives the published number."""

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        divide_by: float = 26.0,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self.divide_by = divide_by
        self._clip = CLIPPairs(model, processor, "pick_score", batch_size, offload)

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        factor = self._clip.logit_scale / self.divide_by

        def score(images: list[Any], texts: list[str]) -> list[float]:
            return [factor * cosine for cosine in self._clip.cosine(images, texts, device)]

        return mean_over_frames(frames, prompts, score)
