"""Stable Diffusion 1.x: a DDIM model that predicts noise."""

from typing import Any

import torch
from diffusers import DDIMScheduler

from ....errors import ConfigError
from ....experience.vision import Conditions
from ..layers import upcast
from .base import DiffusionFamily, decoded, encoded_mean, in_whole_batches, spatial_latent
from .wan import ATTENTION

T = torch.Tensor


class StableDiffusion15(DiffusionFamily):
    """sigma is sqrt(1 - alpha_bar); the last step goes to alpha_bar = 1. Timesteps are the scheduler's integers."""

    prediction = "epsilon"
    denoiser_names = ("unet",)
    lora_targets = ATTENTION
    default_text_length = 77
    takes_text_length = False
    texts_at_once = 8

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """CLIP: context (B, 77, D)."""
        return {"context": self.pipeline.encode_prompt(prompts, self.device, 1, False)[0]}

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Noise, fp32."""
        dtype = self.dtype
        return upcast(self.pipeline.unet(
            latents.to(dtype), timesteps, encoder_hidden_states=conditions["context"].to(dtype), return_dict=False
        )[0])  # fmt: skip

    def default_schedule(self, num_steps: int, latent_shape: tuple[int, ...], flow_shift: float | None) -> tuple[T, T]:
        """DDIM's timesteps and sqrt(1 - alpha_bar). Raises ConfigError for a flow shift or another prediction type."""
        if flow_shift is not None:
            raise ConfigError("flow_shift belongs to flow-matching models, this one is a DDIM model")
        scheduler = DDIMScheduler.from_config(self.pipeline.scheduler.config)
        if scheduler.config.prediction_type != "epsilon":
            raise ConfigError(f"prediction_type {scheduler.config.prediction_type} is not built yet; only epsilon is")
        scheduler.set_timesteps(num_steps)
        alpha_bar = scheduler.alphas_cumprod.double()[scheduler.timesteps]
        return scheduler.timesteps.float(), (1 - alpha_bar).sqrt().float()

    @classmethod
    def evaluated(cls, scheduler: Any, name: str, flow_shift: float | None) -> Any:
        """DDIM's, of which no sample is clipped and which ends at alpha_bar = 1.

        Args: as of `DiffusionFamily.evaluated`.
        """
        return DDIMScheduler.from_config(scheduler.config, clip_sample=False, thresholding=False, set_alpha_to_one=True)

    def decode(self, latents: T) -> T:
        """(B, 4, h, w) to (B, 3, H, W)."""
        vae = self.pipeline.vae
        return decoded(vae, latents / vae.config.scaling_factor)

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, 4, h, w): the mean of the autoencoder's answer."""
        vae = self.pipeline.vae
        return encoded_mean(vae, images) * vae.config.scaling_factor

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(4, height / 8, width / 8)."""
        unet, scale = self.pipeline.unet, self.pipeline.vae_scale_factor
        multiple = scale * 2 ** (len(unet.config.block_out_channels) - 1)
        return unet.config.in_channels, *spatial_latent(height, width, scale, multiple)
