"""CLIPScore (Hessel et al., arXiv 2104.08718)."""

from __future__ import annotations

from typing import Any

from .clip_model import CLIPPairs
from .image_scoring import mean_over_frames


class CLIPScore:
    """weight * max(cosine of image and prompt, 0); the paper's weight is 2.5. A video's score is the mean over its
    frames. model: a CLIP checkpoint folder or hub name."""

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        weight: float = 2.5,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self.weight = weight
        self._clip = CLIPPairs(model, None, "clip_score", batch_size, offload)

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            return [self.weight * max(cosine, 0.0) for cosine in self._clip.cosine(images, texts, device)]

        return mean_over_frames(frames, prompts, score)
