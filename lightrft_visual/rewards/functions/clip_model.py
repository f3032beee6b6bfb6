"""A CLIP model for the scorers that compare images with texts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CLIPModel, CLIPProcessor

from ...runtime.offload import on_device
from .image_scoring import in_batches, load_checkpoint


class CLIPPairs:
    """Normalised embeddings of images and texts, in batches. Texts are cut at the model's length, as CLIP's are."""

    def __init__(self, model: str, processor: str | None, scorer: str, batch_size: int, offload: bool) -> None:
        self.model = load_checkpoint(CLIPModel.from_pretrained, model, scorer).eval()
        self.processor = load_checkpoint(CLIPProcessor.from_pretrained, processor or model, scorer)
        self.batch_size, self.offload = batch_size, offload

    @property
    def logit_scale(self) -> float:
        """The learned factor of cosines, exp(logit_scale)."""
        return float(self.model.logit_scale.detach().exp())

    def embed(self, frames: list[Any], texts: list[str], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, D) image and (n, D) text embeddings of unit length, float32 on the CPU."""
        images, words = [], []
        with on_device(self.model, device, self.offload) as model:
            for part in in_batches(self.batch_size, len(frames)):
                inputs = self.processor(
                    text=[texts[i] for i in part],
                    images=[frames[i].convert("RGB") for i in part],
                    padding=True,
                    truncation=True,
                    max_length=self.model.config.text_config.max_position_embeddings,
                    return_tensors="pt",
                )
                output = model(**inputs.to(device))
                images.append(output.image_embeds.float().cpu())
                words.append(output.text_embeds.float().cpu())
        return torch.cat(images), torch.cat(words)

    def cosine(self, images: list[Any], texts: list[str], device: Any) -> list[float]:
        """Cosine similarity of each image with its text."""
        image, text = self.embed(images, texts, device)
        return (image * text).sum(dim=-1).tolist()
