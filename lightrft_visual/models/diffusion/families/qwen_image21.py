"""Qwen-Image 2.1, text to image: one stream of text and image tokens, an autoencoder of red, green, blue and alpha."""

import torch
from diffusers import DiffusionPipeline

from ....config.diffusion import DiffusionRunConfig
from ....errors import ConfigError
from ....experience.vision import MASK, Conditions, used_widths
from ..layers import upcast
from .base import DiffusionFamily, by_kind, spatial_latent
from .qwen_image import QwenImage

T = torch.Tensor
SCALE = 16  # pixels of a latent along each side, in its pipeline a constant too


class QwenImage21(QwenImage):
    """Latents (C, h, w), a token each. The position of the image's tokens is behind all of the text's, padding too: a
    forward takes samples of one text length, so that a sample is what it is alone. Images to edit are not read."""

    default_text_length = None
    takes_text_length = False
    token_area = 1

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        if pipeline.config.get("sample_sigmas"):
            raise ConfigError("this Qwen-Image 2.1 has sigmas of its own (sample_sigmas), which is not built")
        super().__init__(pipeline, text_length)

    @classmethod
    def check(cls, config: DiffusionRunConfig) -> None:
        """Also of a size that it does not draw, whatever the checkpoint."""
        super().check(config)
        spatial_latent(config.sampling.height, config.sampling.width, SCALE, 2 * SCALE)

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        return by_kind(
            used_widths(conditions[MASK]), self.pipeline.transformer, self._run, latents, timesteps, conditions
        )

    def _run(self, length: int, latents: T, timesteps: T, conditions: Conditions) -> T:
        """Velocity of samples whose texts have this length."""
        (height, width), dtype = latents.shape[-2:], self.dtype
        slots = torch.ones(len(latents), length + height * width // 4, dtype=torch.bool, device=latents.device)
        slots[:, :length] = False
        made = self.pipeline.transformer(
            hidden_states=latents.flatten(2).transpose(1, 2).to(dtype), timestep=timesteps / 1000,
            encoder_hidden_states=conditions["context"][:, :length].to(dtype), img_mask=slots,
            img_shapes=[[(1, height, width)]] * len(latents), return_dict=False,
        )[0]  # fmt: skip
        return upcast(made[:, -height * width :].transpose(1, 2).reshape(latents.shape))

    def combine(self, without: T, with_prompt: T, guidance_scale: float | T) -> T:
        """Plain guidance."""
        return DiffusionFamily.combine(self, without, with_prompt, guidance_scale)

    def decode(self, latents: T) -> T:
        """(B, C, h, w) to (B, 3, H, W), without alpha."""
        return super().decode(latents)[:, :3]

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, C, h, w) of opaque images."""
        return super().encode(torch.cat([images, torch.ones_like(images[:, :1])], dim=1))

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 16, width / 16)."""
        return self.pipeline.transformer.config.in_channels, *spatial_latent(height, width, SCALE, 2 * SCALE)
