"""Objects of an image by Mask2Former, for scorers with rules over objects."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

from ...models.weight_files import load_whole
from ...runtime.offload import on_device
from ...runtime.packages import needed
from .image_scoring import load_checkpoint

MOST_QUERIES = 100  # detections of an image, the likeliest first
SIZE = {"shortest_edge": 800, "longest_edge": 1333}  # as its authors test it; published files say 384 x 384


class Found(NamedTuple):
    """One object: box (left, top, right, bottom) in pixels, its score, and its mask (H, W) or None."""

    name: str
    box: tuple[float, float, float, float]
    score: float
    mask: np.ndarray | None = None


class MaskDetector:
    """Mask2Former trained on COCO's objects, read as its authors' instance branch does: the likeliest 100 pairs of a
    query and a class, each scored by its class times its mask. renamed: other names of its classes. The model stays on
    the device that it was called with: whoever calls it for many images ends its turn."""

    def __init__(self, model: str, scorer: str, renamed: Mapping[str, str]) -> None:
        with needed("scipy"):  # transformers asks for it in the model's constructor
            import scipy  # noqa: F401
        self.model = load_checkpoint(partial(load_whole, Mask2FormerForUniversalSegmentation), model, scorer).eval()
        self._processor = load_checkpoint(AutoImageProcessor.from_pretrained, model, scorer, size=SIZE)
        self.names = [renamed.get(name, name) for _, name in sorted(self.model.config.id2label.items())]

    @torch.no_grad()
    def __call__(self, image: Image.Image, device: Any) -> list[Found]:
        """All objects of an RGB image, of any score."""
        with on_device(self.model, device, offload=False) as model:
            output = model(**self._processor(images=image, return_tensors="pt").to(device))
        chances = output.class_queries_logits[0].float().softmax(dim=-1)[:, :-1]
        best = chances.flatten().topk(min(MOST_QUERIES, chances.numel()))
        masks = torch.nn.functional.interpolate(
            output.masks_queries_logits.float(), size=(image.height, image.width), mode="bilinear", align_corners=False
        )[0]
        found = []
        for chance, index in zip(best.values.tolist(), best.indices.tolist()):
            query, label = divmod(index, chances.shape[1])
            inside = masks[query] > 0
            if inside.any():
                sure = float(masks[query].sigmoid()[inside].mean())
                lines, columns = (torch.nonzero(inside.any(dim=axis)).flatten() for axis in (1, 0))
                box = (float(columns[0]), float(lines[0]), float(columns[-1] + 1), float(lines[-1] + 1))
                found.append(Found(self.names[label], box, chance * sure, inside.cpu().numpy()))
        return found
