"""LAION's aesthetic predictor v2 (improved-aesthetic-predictor)."""

from typing import Any

from .clip import CLIPPairs
from .image_scoring import linear_stack, load_tensors, mean_over_frames


class Aesthetic:
    """A stack of linear layers over the unit-length CLIP embedding of an image, about 1 to 10, times `scale`.

    head: its weights (`layers.<i>.weight`), such as sac+logos+ava1-l14-linearMSE.pth, as a file or `hub/name:file`.
    """

    def __init__(
        self,
        head: str,
        model: str = "openai/clip-vit-large-patch14",
        scale: float = 1.0,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self.scale = scale
        self._head = linear_stack(load_tensors(head, "aesthetic"), "layers.", "aesthetic").eval()
        self._clip = CLIPPairs(model, None, "aesthetic", batch_size, offload)

    def __call__(self, frames: list[list[Any]], device: Any) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            image, _ = self._clip.embed(images, texts, device)
            return (self._head(image).detach().squeeze(-1) * self.scale).tolist()

        return mean_over_frames(frames, [""] * len(frames), score)
