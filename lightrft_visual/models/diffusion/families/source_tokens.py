"""Of models that edit: tokens of the source images stand behind those that are denoised."""

import math
from functools import partial
from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

from ....errors import ConfigError
from ....experience.vision import Conditions
from ....runtime.host_copies import on_host
from ..layers import upcast
from .base import PackedLatents, by_kind, pack, unpack

T = torch.Tensor
SOURCE_PIXELS = 1024 * 1024  # area that the pipelines scale source images to
SIDE = 32  # pixels; sides are multiples of it


class SourceTokens(PackedLatents):
    """Source images as tokens beside those of the noisy latents; goes before the family of the model that draws.

    Source images keep their proportions, so those of a batch may differ in size; a forward takes samples of one size.
    `source` (1, L, 4 C) holds the tokens of all images of a prompt, `source_grid` (1, N, 2) rows and columns of each.
    """

    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """Raises ConfigError: a text alone is nothing to this model."""
        raise ConfigError(f"{type(self.pipeline).__name__} edits images: it needs at least one beside each text")

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

    def planned_sources(self, count: int) -> Conditions:
        """The same of `count` samples with as many images as the model takes, without contents."""
        images, area = self.most_source_images, self.source_pixels or SOURCE_PIXELS
        grid_h = grid_w = math.isqrt(area) // (2 * self.pipeline.vae_scale_factor)
        channels = self.pipeline.transformer.config.in_channels
        return {
            "source": torch.empty(count, images * grid_h * grid_w, channels, device="meta"),
            "source_grid": torch.tensor([[[grid_h, grid_w]] * images] * count),  # is read on the host
        }

    def _scaled(self, image: Any, pixels: int) -> Any:
        """The image at about this area, in its proportions."""
        width, height, *_ = calculate_dimensions(pixels, image.width / image.height)
        return self.pipeline.image_processor.resize(image, max(height, SIDE), max(width, SIDE))

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        sizes = [tuple(map(tuple, sample)) for sample in on_host(conditions["source_grid"]).tolist()]
        run, transformer = partial(self._run, guidance_scale), self.pipeline.transformer
        return by_kind(sizes, transformer, run, latents, timesteps, conditions)

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
