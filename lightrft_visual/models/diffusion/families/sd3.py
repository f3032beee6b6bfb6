"""Stable Diffusion 3 and 3.5."""

import torch
from diffusers import DiffusionPipeline
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from ....errors import ConfigError
from ....experience.vision import Conditions
from ..layers import JointAttention, upcast
from .base import KLImages, in_whole_batches, spatial_latent

T = torch.Tensor


class StableDiffusion3(KLImages):
    """SD3Transformer2DModel with AutoencoderKL; timesteps are sigma * 1000."""

    texts_at_once = 8
    context_plan = {
        "pos_embed": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
        "context_embedder": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        super().__init__(pipeline, text_length)
        pipeline.transformer.set_attn_processor(JointAttention())

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """CLIP and T5: context (B, L, D) and pooled (B, D)."""
        context, _, pooled, _ = self.pipeline.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=self.text_length,
            device=self.device,
        )  # fmt: skip
        return {"context": context, "pooled": pooled}

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        dtype = self.dtype
        return upcast(self.pipeline.transformer(
            hidden_states=latents.to(dtype), timestep=timesteps, encoder_hidden_states=conditions["context"].to(dtype),
            pooled_projections=conditions["pooled"].to(dtype), return_dict=False,
        )[0])  # fmt: skip

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 8, width / 8). ConfigError for images larger than the position table."""
        scale, config = self.pipeline.vae_scale_factor, self.pipeline.transformer.config
        most = config.pos_embed_max_size  # None: positions are stretched to any size
        if most and max(height, width) > (largest := most * config.patch_size * scale):
            raise ConfigError(f"height {height} and width {width}: this model draws at most {largest} pixels a side")
        return (config.in_channels, *spatial_latent(height, width, scale, scale * config.patch_size))
