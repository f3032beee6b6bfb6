"""The embedded DDIM model for DDPO and DPOK: a tiny, real Stable Diffusion 1.5 pipeline folder.

The stock classes (UNet2DConditionModel, AutoencoderKL, CLIP text encoder and tokenizer, DDIMScheduler, epsilon
prediction), warmed up on the same drawn shapes with partly wrong captions as the embedded SD3 in `tiny_diffusion.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel

from .drawn_shapes import all_captions
from .tiny_sd3 import (
    DrawingSettings,
    EncodedScenes,
    build_clip_encoder,
    build_clip_tokenizer,
    build_vae,
    built_once,
    optimise,
    spoil_captions,
    warm_up_vae,
)

T = torch.Tensor


@dataclass(frozen=True)
class TinySD15Settings(DrawingSettings):
    """Everything that decides the weights of the embedded Stable Diffusion 1.5."""

    unet_channels: tuple[int, int] = (64, 64)  # the text is read at the lower resolution only: that is cheaper
    heads: int = 2
    unet_steps: int = 1400
    unet_rate: float = 2e-3
    revision: int = 4  # raised when the code below changes what it builds


def embedded_sd15_folder(cache_dir: str | Path | None = None, settings: TinySD15Settings | None = None) -> Path:
    """The folder of the embedded SD 1.5 pipeline; built and warmed up on the first call (minutes), then reused."""
    settings = settings or TinySD15Settings()

    def build() -> StableDiffusionPipeline:
        pipeline = build_sd15_pipeline(settings)
        warm_up_sd15(pipeline, settings)
        return pipeline

    return built_once("tiny-sd15", settings, build, cache_dir)


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


def warm_up_sd15(pipeline: StableDiffusionPipeline, settings: TinySD15Settings) -> None:
    """Train the autoencoder, then the UNet, in place."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    warm_up_vae(pipeline.vae, settings, generator)
    fold_shift(pipeline.vae)
    warm_up_unet(pipeline, settings, generator)


@torch.no_grad()
def fold_shift(vae: AutoencoderKL) -> None:
    """Move the latents' mean into the weights: the SD 1.5 pipeline scales latents and never shifts them."""
    shift, channels = vae.config.shift_factor, vae.config.latent_channels
    vae.encoder.conv_out.bias[:channels] -= shift
    vae.post_quant_conv.bias += shift * vae.post_quant_conv.weight.sum(dim=(1, 2, 3))
    vae.register_to_config(shift_factor=0.0)


def warm_up_unet(pipeline: StableDiffusionPipeline, settings: TinySD15Settings, generator: torch.Generator) -> None:
    """Noise prediction at x = sqrt(alpha_bar) latents + sqrt(1 - alpha_bar) noise, uniform timesteps."""
    unet, size = pipeline.unet, settings.batch_size
    context, alpha_bar = encode_clip_captions(pipeline), pipeline.scheduler.alphas_cumprod
    images = EncodedScenes.draw(pipeline.vae, settings, generator)

    def loss() -> T:
        colours, shapes, latents = images.some(size, generator)
        said = spoil_captions(colours, shapes, settings, generator)
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(len(alpha_bar), (size,), generator=generator)
        kept = alpha_bar[timesteps].view(-1, 1, 1, 1)
        mixed = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        predicted = unet(mixed, timesteps, encoder_hidden_states=context[said], return_dict=False)[0]
        return (predicted - noise).square().mean()

    unet.train()
    optimise(unet.parameters(), loss, settings.unet_steps, settings.unet_rate, "warm-up, UNet")
    unet.eval()


@torch.no_grad()
def encode_clip_captions(pipeline: StableDiffusionPipeline) -> T:
    """(n + 1, L, D) embeddings of all captions; the last row is the empty caption."""
    texts = [caption.text for caption in all_captions()] + [""]
    return pipeline.encode_prompt(texts, "cpu", 1, False)[0]
