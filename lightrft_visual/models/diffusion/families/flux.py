"""FLUX.1: guidance is an embedding (dev) or absent (schnell); there is no unguided branch."""

from __future__ import annotations

import torch

from ....experience.vision import Conditions
from ..layers import upcast
from .base import DiffusionFamily, encoded_mean, in_whole_batches, pack, spatial_latent, unpack

T = torch.Tensor


class Flux(DiffusionFamily):
    """Latents are kept unpacked, (C, h, w); the transformer's timesteps are sigma in 0..1."""

    default_text_length = 512
    texts_at_once = 8
    uses_negative = False

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """T5 context (B, L, D) and pooled CLIP (B, D)."""
        context, pooled, _ = self.pipeline.encode_prompt(
            prompts, None, device=self.device, max_sequence_length=self.text_length
        )
        return {"context": context, "pooled": pooled}

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32; guidance_scale enters as an embedding."""
        height, width = latents.shape[-2:]
        transformer, dtype = self.pipeline.transformer, self.dtype
        guidance = torch.full_like(timesteps, guidance_scale) if transformer.config.guidance_embeds else None
        tokens = transformer(
            hidden_states=pack(latents).to(dtype), timestep=timesteps / 1000, guidance=guidance,
            pooled_projections=conditions["pooled"].to(dtype), encoder_hidden_states=conditions["context"].to(dtype),
            txt_ids=torch.zeros(conditions["context"].shape[1], 3, device=latents.device, dtype=dtype),
            img_ids=image_ids(height // 2, width // 2, latents.device, dtype), return_dict=False,
        )[0]  # fmt: skip
        return upcast(unpack(tokens, height, width))

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
        return self.pipeline.transformer.config.in_channels // 4, *spatial_latent(height, width, scale, 2 * scale)


def image_ids(height: int, width: int, device: torch.device, dtype: torch.dtype) -> T:
    """(rows * columns, 3) positions of the image tokens: 0, row, column."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(y), y, x], dim=-1).reshape(-1, 3).to(device, dtype)
