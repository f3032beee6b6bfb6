"""FLUX.1 Kontext: an image in, an image out. Guidance is an embedding, as in FLUX.1."""

from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

from ....experience.vision import Conditions
from .flux import Flux
from .source_tokens import SourceTokens


class FluxKontext(SourceTokens, Flux):
    """Texts are encoded without the image. It is scaled to one of the sizes that the model was trained with, or to
    `source_pixels`."""

    most_source_images = 1
    texts_at_once = 1

    def encode_edit(self, prompt: str, images: list[Any]) -> Conditions:
        """T5 context (1, L, D) and pooled CLIP (1, D)."""
        return Flux.encode_prompts(self, [prompt])

    def _scaled(self, image: Any, pixels: int) -> Any:
        if self.source_pixels is not None:
            return super()._scaled(image, pixels)
        sides = self.pipeline.image_processor.get_default_height_width(image)  # in whole tokens
        wanted = max(sides[1], 1) / max(sides[0], 1)
        width, height = min(PREFERRED_KONTEXT_RESOLUTIONS, key=lambda size: abs(wanted - size[0] / size[1]))
        return self.pipeline.image_processor.resize(image, height, width)

    def planned_conditions(self, count: int, width: int) -> Conditions:
        """Of `count` samples with an image, without contents; width: of the context."""
        pooled = self.pipeline.transformer.config.pooled_projection_dim
        return self.planned_sources(count) | {
            "context": torch.empty(count, self.text_length, width, dtype=self.dtype, device="meta"),
            "pooled": torch.empty(count, pooled, dtype=self.dtype, device="meta"),
        }
