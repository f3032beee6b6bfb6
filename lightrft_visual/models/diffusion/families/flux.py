"""FLUX.1: guidance is an embedding (dev) or absent (schnell); there is no unguided branch."""

from __future__ import annotations

import torch

from ....experience.vision import Conditions
from ..layers import upcast
from .base import KLImages, in_whole_batches, pack, spatial_latent, unpack

T = torch.Tensor
Grid = tuple[int, int, int]  # frames, rows and columns of an image's tokens


class Flux(KLImages):
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
        grids = [(1, height // 2, width // 2)]
        return upcast(unpack(self._tokens(pack(latents), grids, timesteps, conditions, guidance_scale), height, width))

    def _tokens(self, tokens: T, grids: list[Grid], timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """What the transformer makes of tokens (B, L, 4 C) of images of these sizes, behind each other."""
        transformer, dtype = self.pipeline.transformer, self.dtype
        guidance = torch.full_like(timesteps, guidance_scale) if transformer.config.guidance_embeds else None
        ids = [image_ids(number, *grid[1:]) for number, grid in enumerate(grids)]
        return transformer(
            hidden_states=tokens.to(dtype), timestep=timesteps / 1000, guidance=guidance,
            pooled_projections=conditions["pooled"].to(dtype), encoder_hidden_states=conditions["context"].to(dtype),
            txt_ids=torch.zeros(conditions["context"].shape[1], 3, device=tokens.device, dtype=dtype),
            img_ids=torch.cat(ids).to(tokens.device, dtype), return_dict=False,
        )[0]  # fmt: skip

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 8, width / 8)."""
        scale = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels // 4, *spatial_latent(height, width, scale, 2 * scale)


def image_ids(number: int, height: int, width: int) -> T:
    """(rows * columns, 3) positions of an image's tokens: its number, row, column."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(y, number), y, x], dim=-1).reshape(-1, 3)
