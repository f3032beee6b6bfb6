"""The embedded diffusion models: tiny, real pipeline folders of Stable Diffusion 3 and, for DDPO and DPOK, 1.5.

`models/tiny/diffusion.py` builds them. Their text encoders stay as they were drawn. The warm-up shows drawn shapes with
captions of which a share is wrong, which leaves a base that draws clean shapes but often not the ones asked for:
something for RL to improve.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline, StableDiffusionPipeline
from torch import nn

from ...models.diffusion.opening import save_text_length
from ...models.tiny.diffusion import (
    TEXT_LENGTH,
    TinyDiffusionSettings,
    TinyPipelineSettings,
    TinySD15Settings,
    build_pipeline,
    build_sd15_pipeline,
)
from ...observe.console import RunConsole
from ...runtime.files import cache_folder
from .cached import built_once, key_of
from .drawn_shapes import COLOURS, SHAPES, all_captions, random_images

T = torch.Tensor
REPORT_EVERY = 400  # warm-up steps between two lines of progress


@dataclass(frozen=True)
class DrawingSettings(TinyPipelineSettings):
    """What every embedded pipeline says about its captions and warm-up; the hash of all fields names the cache
    folder."""

    vae_steps: int = 200
    vae_batch_size: int = 48
    vae_rate: float = 6e-3
    pictures: int = 6144  # drawn and encoded once; every warm-up step after the autoencoder's takes some of them
    batch_size: int = 64
    wrong_shape: float = 0.3  # share of warm-up captions that name another shape than the one drawn
    wrong_colour: float = 0.3
    no_caption: float = 0.1  # share of empty captions, for classifier-free guidance


@dataclass(frozen=True)
class EmbeddedSD3Settings(DrawingSettings, TinyDiffusionSettings):
    """Everything that decides the weights of the embedded SD3."""

    transformer_steps: int = 1250
    transformer_rate: float = 2e-3
    revision: int = 4  # raised when the code below changes what it builds


@dataclass(frozen=True)
class EmbeddedSD15Settings(DrawingSettings, TinySD15Settings):
    """Everything that decides the weights of the embedded Stable Diffusion 1.5."""

    unet_steps: int = 1400
    unet_rate: float = 2e-3
    revision: int = 4  # raised when the code below changes what it builds


def embedded_pipeline(settings: DrawingSettings, cache_dir: str | Path | None = None) -> Path:
    """The folder of the embedded pipeline of these settings, named by their hash; built and warmed up on the first call
    (minutes), then reused. cache_dir: below which it is; default: models/ of the cache."""
    kind: tuple[str, Any, Any] = "tiny-sd3", build_pipeline, _warm_up_sd3
    if isinstance(settings, EmbeddedSD15Settings):
        kind = "tiny-sd15", build_sd15_pipeline, _warm_up_sd15
    name, make, warm_up = kind

    def build(folder: Path) -> None:
        pipeline, generator = make(settings), torch.Generator().manual_seed(settings.seed + 1)
        warm_up_vae(pipeline.vae, settings, generator)
        warm_up(pipeline, settings, generator)
        pipeline.save_pretrained(folder)
        save_text_length(folder, TEXT_LENGTH)

    root = Path(cache_dir) if cache_dir else cache_folder() / "models"
    told = f"building the embedded {name} model once: minutes on two idle cores"
    return built_once(root / f"{name}-{key_of(asdict(settings))}", build, told)


def optimise(
    parameters: Iterator[nn.Parameter], loss_of_step: Callable[[], T], steps: int, rate: float, title: str
) -> None:
    """Adam with warm-up and cosine decay to zero.

    Args:
        parameters: to train.
        loss_of_step: a scalar with gradient, asked for once a step.
        steps: updates in all.
        rate: the learning rate between warm-up and decay.
        title: what is trained, in the lines of progress.
    """
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    console = RunConsole(steps, line_every=REPORT_EVERY, table_every=0, title=title)
    for step in range(steps):
        scale = min(1.0, (step + 1) / 40) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        loss = loss_of_step()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        console.step(step + 1, {"loss": loss.item()})
    console.close()


def random_labels(count: int, generator: torch.Generator) -> tuple[T, T]:
    """(count) colour indices and (count) shape indices, uniform."""
    colours = torch.randint(len(COLOURS), (count,), generator=generator)
    return colours, torch.randint(len(SHAPES), (count,), generator=generator)


def warm_up_vae(vae: AutoencoderKL, settings: DrawingSettings, generator: torch.Generator) -> None:
    """Reconstruction with a little noise on the latents; then scale and shift so that latents are about N(0, 1).

    Args:
        vae: trained in place, and frozen then.
        settings: of the pipeline, for those of the autoencoder.
        generator: of drawn images and noise.
    """

    def loss() -> T:
        labels = random_labels(settings.vae_batch_size, generator)
        images = random_images(*labels, settings.picture_size, generator) * 2 - 1
        mean = vae.encode(images).latent_dist.mean
        noisy = mean + 0.1 * torch.randn(mean.shape, generator=generator)
        error = vae.decode(noisy).sample - images  # squared: absolute error alone settles on a median colour
        return 4 * error.square().mean() + 0.2 * error.abs().mean() + 1e-2 * mean.square().mean()

    vae.train()
    optimise(vae.parameters(), loss, settings.vae_steps, settings.vae_rate, "warm-up, autoencoder")
    vae.eval().requires_grad_(False)
    with torch.no_grad():  # the posterior's spread plays no part here: sampling it gives its mean
        vae.encoder.conv_out.weight[settings.latent_channels :].zero_()
        vae.encoder.conv_out.bias[settings.latent_channels :].fill_(-20.0)
        images = random_images(*random_labels(512, generator), settings.picture_size, generator) * 2 - 1
        latents = vae.encode(images).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def fold_shift(vae: AutoencoderKL) -> None:
    """Move the latents' mean into the weights: the SD 1.5 pipeline scales latents and never shifts them."""
    shift, channels = vae.config.shift_factor, vae.config.latent_channels
    vae.encoder.conv_out.bias[:channels] -= shift
    vae.post_quant_conv.bias += shift * vae.post_quant_conv.weight.sum(dim=(1, 2, 3))
    vae.register_to_config(shift_factor=0.0)


def _warm_up_sd3(pipeline: StableDiffusion3Pipeline, settings: EmbeddedSD3Settings, generator: torch.Generator) -> None:
    """Flow matching on encoded images: v = noise - latents at x = (1 - t) latents + t noise."""
    transformer = pipeline.transformer
    context, pooled = encode_captions(pipeline)

    def error(latents: T, said: T, noise: T) -> T:
        time = torch.sigmoid(torch.randn(len(latents), generator=generator) * 1.2)
        mixed = (1 - time.view(-1, 1, 1, 1)) * latents + time.view(-1, 1, 1, 1) * noise
        return transformer(mixed, context[said], pooled[said], time * 1000, return_dict=False)[0] - (noise - latents)

    steps, rate = settings.transformer_steps, settings.transformer_rate
    _warm_up_denoiser(pipeline.vae, transformer, error, settings, generator, steps, rate)


def _warm_up_sd15(
    pipeline: StableDiffusionPipeline, settings: EmbeddedSD15Settings, generator: torch.Generator
) -> None:
    """Noise prediction at x = sqrt(alpha_bar) latents + sqrt(1 - alpha_bar) noise, uniform timesteps."""
    fold_shift(pipeline.vae)
    unet, alpha_bar = pipeline.unet, pipeline.scheduler.alphas_cumprod
    context = encode_clip_captions(pipeline)

    def error(latents: T, said: T, noise: T) -> T:
        timesteps = torch.randint(len(alpha_bar), (len(latents),), generator=generator)
        kept = alpha_bar[timesteps].view(-1, 1, 1, 1)
        mixed = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        return unet(mixed, timesteps, encoder_hidden_states=context[said], return_dict=False)[0] - noise

    _warm_up_denoiser(pipeline.vae, unet, error, settings, generator, settings.unet_steps, settings.unet_rate)


def _warm_up_denoiser(
    vae: AutoencoderKL,
    network: nn.Module,
    error: Callable[[T, T, T], T],
    settings: DrawingSettings,
    generator: torch.Generator,
    steps: int,
    rate: float,
) -> None:
    """error: of what the network predicts for latents, indices of captions, and noise."""
    colours, shapes = random_labels(settings.pictures, generator)
    parts = zip(colours.split(256), shapes.split(256))
    latents = torch.cat([encode_images(vae, random_images(*part, settings.picture_size, generator)) for part in parts])

    def loss() -> T:
        chosen = torch.randint(len(latents), (settings.batch_size,), generator=generator)
        said = spoil_captions(colours[chosen], shapes[chosen], settings, generator)
        some = latents[chosen]
        return error(some, said, torch.randn(some.shape, generator=generator)).square().mean()

    network.train()
    optimise(network.parameters(), loss, steps, rate, "warm-up, denoiser")
    network.eval()


@torch.no_grad()
def encode_images(vae: AutoencoderKL, pictures: T) -> T:
    """Images (B, 3, H, W) in 0..1 to latents (B, C, h, w) in the transformer's scale."""
    latents = vae.encode(pictures * 2 - 1).latent_dist.mean
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


@torch.no_grad()
def encode_captions(pipeline: StableDiffusion3Pipeline) -> tuple[T, T]:
    """Context (n + 1, L, D) and pooled (n + 1, D) embeddings of all captions; the last row is the empty caption."""
    texts = [caption.text for caption in all_captions()] + [""]
    context, _, pooled, _ = pipeline.encode_prompt(
        texts, None, None, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH
    )
    return context, pooled


@torch.no_grad()
def encode_clip_captions(pipeline: StableDiffusionPipeline) -> T:
    """(n + 1, L, D) embeddings of all captions; the last row is the empty caption."""
    texts = [caption.text for caption in all_captions()] + [""]
    return pipeline.encode_prompt(texts, "cpu", 1, False)[0]


def spoil_captions(colours: T, shapes: T, settings: DrawingSettings, generator: torch.Generator) -> T:
    """Caption index (B) of each image, in the order of `encode_captions`, some of them wrong or empty.

    Args:
        colours: (B), indices into COLOURS of what is drawn.
        shapes: (B), indices into SHAPES.
        settings: for the shares of wrong and of empty captions.
        generator: of whose captions change, and to which.
    """
    count = colours.shape[0]
    other_colours, other_shapes = random_labels(count, generator)
    chance = torch.rand(3, count, generator=generator)
    colours = torch.where(chance[0] < settings.wrong_colour, other_colours, colours)
    shapes = torch.where(chance[1] < settings.wrong_shape, other_shapes, shapes)
    said = colours * len(SHAPES) + shapes
    return torch.where(chance[2] < settings.no_caption, len(COLOURS) * len(SHAPES), said)
