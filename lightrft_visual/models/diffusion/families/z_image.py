"""Z-Image: one stream of image and text tokens; texts are encoded by a language model."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ....experience.vision import Conditions, used_widths
from ..layers import upcast
from .base import KLImages, in_whole_batches, spatial_latent

T = torch.Tensor


class ZImage(KLImages):
    """Latents (C, h, w). The transformer counts time from noise to data and predicts data minus noise.

    guidance_scale is that of the stock pipeline, which moves that often the difference beyond the guided prediction: 1
    less than elsewhere.
    """

    default_text_length = 512
    texts_at_once = 8
    takes_graphs = False  # each text has its own length
    names_sigmas = True
    lora_targets = tuple(f"attention.{name}" for name in ("to_k", "to_out.0", "to_q", "to_v"))

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """context (B, L, D) and its mask (B, L), padded to the longest of these texts."""
        texts, _ = self.pipeline.encode_prompt(
            list(prompts), self.device, do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        context = pad_sequence(texts, batch_first=True)
        return {"context": context, "mask": torch.arange(context.shape[1], device=self.device) < lengths[:, None]}

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        dtype = self.dtype
        texts = [text[:n].to(dtype) for text, n in zip(conditions["context"], used_widths(conditions["mask"]))]
        images = list(latents.unsqueeze(2).to(dtype).unbind(dim=0))
        made = self.pipeline.transformer(images, (1000 - timesteps) / 1000, texts, return_dict=False)[0]
        return -upcast(torch.stack(list(made)).squeeze(2))

    def combine(self, without: T, with_prompt: T, guidance_scale: float) -> T:
        """As the stock pipeline's formula has it."""
        return with_prompt + guidance_scale * (with_prompt - without)

    @classmethod
    def stock_guidance(cls, pipeline: Any, scale: float, negative: str | None) -> dict[str, Any]:
        """The pipeline guides from 0 on, and runs from 1 on. Args: as of `DiffusionFamily.stock_guidance`."""
        return super().stock_guidance(pipeline, scale if scale > 1 else 0.0, negative)

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 8, width / 8)."""
        scale = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.in_channels, *spatial_latent(height, width, scale, 2 * scale)
