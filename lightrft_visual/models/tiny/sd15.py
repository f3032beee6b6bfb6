"""A tiny but real Stable Diffusion 1.5 pipeline with freshly drawn weights, of the stock classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel

from .sd3 import TinyPipelineSettings, build_clip_encoder, build_clip_tokenizer, build_vae


@dataclass(frozen=True)
class TinySD15Settings(TinyPipelineSettings):
    """The tiny Stable Diffusion 1.5."""

    unet_channels: tuple[int, int] = (64, 64)  # the text is read at the lower resolution only: that is cheaper
    heads: int = 2


def build_sd15_pipeline(settings: TinySD15Settings) -> StableDiffusionPipeline:
    """The pipeline with freshly drawn weights (fp32, CPU)."""
    torch.manual_seed(settings.seed)
    tokenizer, channels = build_clip_tokenizer(), settings.unet_channels
    unet = UNet2DConditionModel(
        sample_size=settings.picture_size // 2 ** (len(settings.vae_channels) - 1),
        in_channels=settings.latent_channels, out_channels=settings.latent_channels, layers_per_block=1,
        block_out_channels=channels, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=settings.text_width,
        attention_head_dim=settings.heads, norm_num_groups=8,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, timestep_spacing="trailing",
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=build_vae(settings, post_quant=True), text_encoder=build_clip_encoder(tokenizer, settings, CLIPTextModel),
        tokenizer=tokenizer, unet=unet, scheduler=scheduler, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
