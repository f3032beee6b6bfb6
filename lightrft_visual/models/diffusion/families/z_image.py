"""Z-Image: one stream of image and text tokens; texts are encoded by a language model."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ....experience.vision import Conditions, used_widths
from ..layers import flow_match_schedule, upcast
from .base import DiffusionFamily, encoded_mean, in_whole_batches, spatial_latent

T = torch.Tensor


class ZImage(DiffusionFamily):
    """Latents (C, h, w). The transformer counts time from noise to data and predicts data minus noise.

    guidance_scale is that of the stock pipeline, which moves that often the difference beyond the guided prediction: 1
    less than elsewhere.
    """

    default_text_length = 512
    texts_at_once = 8
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

    def default_schedule(self, num_steps: int, latent_shape: tuple[int, ...], flow_shift: float | None) -> tuple[T, T]:
        """As in the base class; the pipeline names the sigmas before their shift itself."""
        scheduler = self.pipeline.scheduler
        if flow_shift is not None:
            return flow_match_schedule(num_steps, flow_shift)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=self._dynamic_shift(latent_shape))
        return scheduler.timesteps.clone().float(), scheduler.sigmas[:-1].clone().float()

    def decode(self, latents: T) -> T:
        """(B, C, h, w) to (B, 3, H, W)."""
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return upcast(vae.decode(latents.to(vae.dtype), return_dict=False)[0]) / 2 + 0.5

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, C, h, w): the mean of the autoencoder's answer."""
        vae = self.pipeline.vae
        return (encoded_mean(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 8, width / 8)."""
        scale = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.in_channels, *spatial_latent(height, width, scale, 2 * scale)
