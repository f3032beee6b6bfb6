"""Qwen-Image-Edit: images in, an image out. Tokens of the source images stand behind those that are denoised."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

from ....errors import ConfigError
from ....experience.vision import MASK, Conditions
from ..layers import upcast
from .base import by_kind, pack, unpack
from .qwen_image import QwenImage

T = torch.Tensor
SOURCE_PIXELS = 1024 * 1024  # area that the pipelines scale source images to
SIDE = 32  # pixels; sides are multiples of it
READ_PIXELS = 384 * 384  # largest area of the images that the text encoder of the later pipeline reads
READ_TOKEN, ASKED_TOKENS = 28 * 28, 256  # pixels of a token there; tokens that a plan has for the text itself


class QwenImageEdit(QwenImage):
    """Conditions are of (text, images) pairs: what the text encoder makes of both, and the images' latents.

    Source images keep their proportions, so those of a batch may differ in size; a forward takes samples of one size.
    `source` (1, L, 4 C) holds the tokens of all
    images of a prompt, `source_grid` (1, N, 2) rows and columns of each.
    """

    default_text_length = None
    most_source_images = 1
    read_pixels = SOURCE_PIXELS  # largest area of the images that the text encoder reads

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        if text_length is not None:
            raise ConfigError(f"{type(pipeline).__name__} reads texts at any length: leave max_sequence_length out")
        super().__init__(pipeline)

    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """Raises ConfigError: a text alone is nothing to this model."""
        raise ConfigError(f"{type(self.pipeline).__name__} edits images: it needs at least one beside each text")

    def encode_edit(self, prompt: str, images: list[Any]) -> Conditions:
        """context (1, L, D) and mask (1, L) of the text with its images."""
        (image,) = images
        return self._encoded([prompt], self._scaled(image, self._area(self.read_pixels)))

    def _encoded(self, prompt: list[str], image: Any) -> Conditions:
        context, mask = self.pipeline.encode_prompt(prompt, image=image, device=self.device)
        if mask is None:
            mask = torch.ones(context.shape[:2], dtype=torch.long, device=context.device)
        return {"context": context, MASK: mask}

    def _area(self, most: int) -> int:
        return min(most, self.source_pixels or SOURCE_PIXELS)

    def encode_sources(self, images: list[Any]) -> Conditions:
        """source (1, L, 4 C) and source_grid (1, N, 2)."""
        tokens, grids = [], []
        for image in images:
            scaled = self._scaled(image, self.source_pixels or SOURCE_PIXELS)
            pixels = self.pipeline.image_processor.preprocess(scaled, scaled.height, scaled.width) / 2 + 0.5
            latents = self.encode(pixels.to(self.device))
            tokens.append(pack(latents))
            grids.append([latents.shape[-2] // 2, latents.shape[-1] // 2])
        return {"source": torch.cat(tokens, dim=1), "source_grid": torch.tensor([grids], device=self.device)}

    def _scaled(self, image: Any, pixels: int) -> Any:
        """The image at about this area, in its proportions."""
        width, height, *_ = calculate_dimensions(pixels, image.width / image.height)
        return self.pipeline.image_processor.resize(image, max(height, SIDE), max(width, SIDE))

    def planned_conditions(self, count: int, width: int) -> Conditions:
        """Of `count` samples with as many images as the model takes, without contents; width: of the context."""
        images, area = self.most_source_images, self.source_pixels or SOURCE_PIXELS
        grid_h = grid_w = math.isqrt(area) // (2 * self.pipeline.vae_scale_factor)
        read = images * self._area(self.read_pixels) // READ_TOKEN + ASKED_TOKENS
        tokens = self.pipeline.transformer.config.in_channels
        return {
            "context": torch.empty(count, read, width, dtype=self.dtype, device="meta"),
            MASK: torch.ones(count, read, dtype=torch.long, device="meta"),
            "source": torch.empty(count, images * grid_h * grid_w, tokens, device="meta"),
            "source_grid": torch.tensor([[[grid_h, grid_w]] * images] * count),  # is read on the host
        }

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        sizes = [tuple(map(tuple, sample)) for sample in conditions["source_grid"].tolist()]
        return by_kind(sizes, partial(self._run, guidance_scale), latents, timesteps, conditions)

    def _run(
        self, guidance_scale: float, size: tuple[tuple[int, int], ...], latents: T, timesteps: T, conditions: Conditions
    ) -> T:
        """Velocity of samples whose source images have one size, in tokens."""
        grids = [(1, grid_h, grid_w) for grid_h, grid_w in size if grid_h]  # a prompt with fewer images is padded by 0
        source = conditions["source"][:, : sum(grid_h * grid_w for _, grid_h, grid_w in grids)]
        (height, width), noisy = latents.shape[-2:], pack(latents)
        tokens = torch.cat([noisy, source.to(noisy.dtype)], dim=1)
        shapes = [(1, height // 2, width // 2), *grids]
        made = self._tokens(tokens, shapes, timesteps, conditions, guidance_scale)
        return upcast(unpack(made[:, : noisy.shape[1]], height, width))


class QwenImageEditPlus(QwenImageEdit):
    """Several source images; the text encoder reads smaller ones than the denoiser does."""

    most_source_images = 3  # as many as the checkpoints were trained with
    read_pixels = READ_PIXELS

    def encode_edit(self, prompt: str, images: list[Any]) -> Conditions:
        """context (1, L, D) and mask (1, L) of the text with its images."""
        area = self._area(self.read_pixels)
        return self._encoded([prompt], [self._scaled(image, area) for image in images])
