"""The embedded DDIM model for DDPO and DPOK: a tiny, real Stable Diffusion 1.5 pipeline folder.

`models/tiny/diffusion.py` builds it. It is warmed up on the same drawn shapes with partly
wrong captions as the embedded SD3 in `warmup_sd3.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline

from ...models.tiny.diffusion import TinySD15Settings, build_sd15_pipeline
from .drawn_shapes import all_captions
from .warmup_sd3 import DrawingSettings, EncodedScenes, built_once, optimise, spoil_captions, warm_up_vae

T = torch.Tensor


@dataclass(frozen=True)
class EmbeddedSD15Settings(DrawingSettings, TinySD15Settings):
    """Everything that decides the weights of the embedded Stable Diffusion 1.5."""

    unet_steps: int = 1400
    unet_rate: float = 2e-3
    revision: int = 4  # raised when the code below changes what it builds


def embedded_sd15_folder(cache_dir: str | Path | None = None, settings: EmbeddedSD15Settings | None = None) -> Path:
    """The folder of the embedded SD 1.5 pipeline; built and warmed up on the first call (minutes), then reused."""
    settings = settings or EmbeddedSD15Settings()

    def build() -> StableDiffusionPipeline:
        pipeline = build_sd15_pipeline(settings)
        warm_up_sd15(pipeline, settings)
        return pipeline

    return built_once("tiny-sd15", settings, build, cache_dir)


def warm_up_sd15(pipeline: StableDiffusionPipeline, settings: EmbeddedSD15Settings) -> None:
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


def warm_up_unet(pipeline: StableDiffusionPipeline, settings: EmbeddedSD15Settings, generator: torch.Generator) -> None:
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
