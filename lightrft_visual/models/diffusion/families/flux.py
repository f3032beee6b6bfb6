"""FLUX.1: guidance is an embedding (dev) or absent (schnell); there is no unguided branch."""

import torch

from ....experience.vision import Conditions
from .base import Grid, KLImages, PackedLatents, in_whole_batches

T = torch.Tensor


class Flux(PackedLatents, KLImages):
    """The transformer's timesteps are sigma in 0..1."""

    default_text_length = 512
    texts_at_once = 8
    uses_negative = False
    names_sigmas = True

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """T5 context (B, L, D) and pooled CLIP (B, D)."""
        context, pooled, _ = self.pipeline.encode_prompt(
            prompts, None, device=self.device, max_sequence_length=self.text_length
        )
        return {"context": context, "pooled": pooled}

    def _tokens(self, tokens: T, grids: list[Grid], timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        transformer, dtype = self.pipeline.transformer, self.dtype
        guidance = torch.full_like(timesteps, guidance_scale) if transformer.config.guidance_embeds else None
        with tokens.device:  # made on the host, the copy would wait for the device in each forward
            ids = [_image_ids(number, *grid[1:]) for number, grid in enumerate(grids)]
        return transformer(
            hidden_states=tokens.to(dtype), timestep=timesteps / 1000, guidance=guidance,
            pooled_projections=conditions["pooled"].to(dtype), encoder_hidden_states=conditions["context"].to(dtype),
            txt_ids=torch.zeros(conditions["context"].shape[1], 3, device=tokens.device, dtype=dtype),
            img_ids=torch.cat(ids).to(dtype), return_dict=False,
        )[0]  # fmt: skip


def _image_ids(number: int, height: int, width: int) -> T:
    """(rows * columns, 3) positions of an image's tokens: its number, row, column."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(y, number), y, x], dim=-1).reshape(-1, 3)
