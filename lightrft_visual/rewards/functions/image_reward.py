"""ImageReward (Xu et al., arXiv 2304.05977)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torchvision.transforms import InterpolationMode, functional
from transformers import AutoProcessor, BlipForImageTextRetrieval

from ...models.weight_files import load_whole
from ...runtime.offload import on_device
from .image_scoring import in_batches, linear_stack, load_checkpoint, load_tensors, mean_over_frames

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the published head


class ImageReward:
    """A BLIP text encoder that attends to the image's middle square, and a linear stack over its first token,
    standardised.

    model: a BlipForImageTextRetrieval checkpoint with ImageReward's weights; head: its `mlp.layers.<i>.weight`, as a
    file or `hub/name:file`.
    """

    def __init__(
        self,
        model: str,
        head: str,
        mean: float = MEAN,
        std: float = STD,
        max_words: int = 35,
        batch_size: int = 16,
        offload: bool = True,
    ) -> None:
        self.mean, self.std, self.max_words = mean, std, max_words
        self.batch_size, self.offload = batch_size, offload
        self._blip = load_checkpoint(partial(load_whole, BlipForImageTextRetrieval), model, "image_reward").eval()
        self._processor = load_checkpoint(AutoProcessor.from_pretrained, model, "image_reward")
        self._head = linear_stack(load_tensors(head, "image_reward"), "mlp.layers.", "image_reward").eval()

    def __call__(self, frames: list[list[Any]], prompts: list[str], device: Any) -> list[float | None]:
        def score(images: list[Any], texts: list[str]) -> list[float]:
            first = self._first_tokens(images, texts, device)
            return ((self._head(first).detach().squeeze(-1) - self.mean) / self.std).tolist()

        return mean_over_frames(frames, prompts, score)

    def _first_tokens(self, images: list[Any], texts: list[str], device: Any) -> torch.Tensor:
        """(n, H) float32 on the CPU."""
        found, size = [], self._blip.config.vision_config.image_size
        with on_device(self._blip, device, self.offload) as blip:
            for part in in_batches(self.batch_size, len(images)):
                shown = [functional.resize(images[i].convert("RGB"), size, InterpolationMode.BICUBIC) for i in part]
                inputs = self._processor(
                    images=[functional.center_crop(image, size) for image in shown],
                    text=[texts[i] for i in part],
                    padding="max_length",
                    truncation=True,
                    max_length=self.max_words,
                    return_tensors="pt",
                ).to(device)
                seen = blip.vision_model(pixel_values=inputs["pixel_values"]).last_hidden_state
                read = blip.text_encoder(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    encoder_hidden_states=seen,
                    encoder_attention_mask=torch.ones(seen.shape[:-1], dtype=torch.long, device=seen.device),
                )
                found.append(read.last_hidden_state[:, 0].float().cpu())
        return torch.cat(found)
