"""Cosmos-Predict2 text-to-image.

The pipeline runs in EDM coordinates, x_edm = data + s noise with s from 80 down. Divided by 1 + s they are the flow
coordinates of this package, x = (1 - t) data + t noise with t = s / (1 + s), in which the network's input is x and its
output the velocity: Euler steps in either are the same.
"""

from typing import Any

import torch
from torch import nn

from ....config.diffusion import DiffusionRunConfig
from ....errors import ConfigError
from ....experience.vision import Conditions
from ..layers import flow_match_schedule, upcast
from .base import DiffusionFamily, channel_statistics, decoded, encoded_mean, in_whole_batches, spatial_latent
from .wan import ATTENTION

T = torch.Tensor


class NoSafetyChecker(nn.Module):
    """In the place of the guardrail models, which the pipeline would fetch: its call needs them, training does not."""

    device, dtype = torch.device("cpu"), torch.float32  # a pipeline asks its parts for them


class CosmosPredict2(DiffusionFamily):
    """Latents (C, F, h, w). guidance_scale 1 is none, as in the other families; the pipeline's own counts from 0."""

    lora_targets = ATTENTION
    default_text_length = 512
    texts_at_once = 8

    @classmethod
    def loading(cls) -> dict[str, Any]:
        """No guardrail models."""
        return {"safety_checker": NoSafetyChecker()}

    @classmethod
    def check(cls, config: DiffusionRunConfig) -> None:
        """Also of a scale that its pipeline does not guide at."""
        super().check(config)
        if 1 < (scale := config.sampling.guidance_scale) <= 2:
            raise ConfigError(
                f"guidance_scale {scale:g} is {scale - 1:g} in Cosmos's pipeline, which guides above 1 only: use 1, "
                "which is no guidance, or more than 2"
            )

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """T5: context (B, L, D)."""
        return self.context_of(prompts, do_classifier_free_guidance=False)

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        dtype, scale = self.dtype, self.pipeline.vae_scale_factor_spatial
        padding = latents.new_zeros(1, 1, latents.shape[-2] * scale, latents.shape[-1] * scale, dtype=dtype)
        return upcast(self.pipeline.transformer(
            hidden_states=latents.to(dtype), timestep=(timesteps / 1000).to(dtype),
            encoder_hidden_states=conditions["context"].to(dtype), padding_mask=padding, return_dict=False,
        )[0])  # fmt: skip

    def default_schedule(self, num_steps: int, latent_shape: tuple[int, ...], flow_shift: float | None) -> tuple[T, T]:
        """The scheduler's EDM sigmas as flow sigmas."""
        if flow_shift is not None:
            return flow_match_schedule(num_steps, flow_shift)
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(sigmas=torch.linspace(0, 1, num_steps, dtype=torch.float64))
        edm = scheduler.sigmas[:num_steps].double()
        sigmas = (edm / (1 + edm)).float()
        return sigmas * 1000, sigmas

    def flow_shift(self, latent_shape: tuple[int, ...], num_steps: int) -> float:
        """1: the EDM schedule has none."""
        return 1.0

    def starting_scale(self, sigma: float) -> float:
        """The pipeline starts from pure noise of size s_max = 80, which divided by 1 + s_max is 80/81 noise."""
        return sigma

    @classmethod
    def stock_guidance(cls, pipeline: Any, scale: float, negative: str | None) -> dict[str, Any]:
        """1 less. Args: as of `DiffusionFamily.stock_guidance`."""
        return super().stock_guidance(pipeline, scale - 1, negative)

    @classmethod
    def evaluated(cls, scheduler: Any, name: str, flow_shift: float | None) -> Any:
        """The pipeline's own, at whose timesteps alone it draws. Args: as of `DiffusionFamily.evaluated`."""
        return scheduler if name == "model_default" and flow_shift is None else None

    def decode(self, latents: T) -> T:
        """(B, C, F, h, w) to (B, 3, H, W), or (B, 3, T, H, W) for several frames."""
        vae = self.pipeline.vae
        mean, std = channel_statistics(vae, latents)
        media = decoded(vae, latents * std / self.pipeline.scheduler.config.sigma_data + mean)
        return media[:, :, 0] if media.shape[2] == 1 else media

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, C, 1, h, w): the mean of the autoencoder's answer."""
        frames = encoded_mean(self.pipeline.vae, images[:, :, None])
        mean, std = channel_statistics(self.pipeline.vae, frames)
        return (frames - mean) * self.pipeline.scheduler.config.sigma_data / std

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, F, height / 8, width / 8)."""
        pipeline = self.pipeline
        scale, patch = pipeline.vae_scale_factor_spatial, pipeline.transformer.config.patch_size[-1]
        latent_height, latent_width = spatial_latent(height, width, scale, scale * patch)
        depth = (frames - 1) // pipeline.vae_scale_factor_temporal + 1
        return pipeline.transformer.config.in_channels, depth, latent_height, latent_width
