"""Qwen-Image-Edit: images in, an image out. Tokens of the source images stand behind those that are denoised."""

from typing import Any

import torch

from ....errors import DataError
from ....experience.vision import MASK, Conditions
from .qwen_image import QwenImage
from .source_tokens import SOURCE_PIXELS, SourceTokens

T = torch.Tensor
READ_PIXELS = 384 * 384  # largest area of the images that the text encoder of the later pipeline reads
READ_TOKEN, ASKED_TOKENS = 28 * 28, 256  # pixels of a token there; tokens that a plan has for the text itself

SHOWN = 200  # characters of a wrong prompt in a message


class QwenImageEdit(SourceTokens, QwenImage):
    """Conditions are of (text, images) pairs: what the text encoder makes of both, and the images' latents.

    See `SourceTokens` for the latter.
    """

    default_text_length = None
    takes_text_length = False
    most_source_images = 1
    read_pixels = SOURCE_PIXELS  # largest area of the images that the text encoder reads

    def encode_edit(self, prompt: str, images: list[Any]) -> Conditions:
        """context (1, L, D) and mask (1, L) of the text with its images."""
        area = self._area(self.read_pixels)
        return self._encoded([prompt], image=[self._scaled(image, area) for image in images])

    def _encoded(self, prompts: list[str], **asked: Any) -> Conditions:
        mark = self.pipeline.processor.image_token
        for prompt in prompts:
            if mark in prompt:
                told = f"the prompt {prompt[:SHOWN]!r} holds {mark}, which this model would read as one more image"
                raise DataError(told, "vision token in the text")
        return super()._encoded(prompts, **asked)

    def _area(self, most: int) -> int:
        return min(most, self.source_pixels or SOURCE_PIXELS)

    def planned_conditions(self, count: int, width: int) -> Conditions:
        """Of `count` samples with as many images as the model takes, without contents; width: of the context."""
        read = self.most_source_images * self._area(self.read_pixels) // READ_TOKEN + ASKED_TOKENS
        return self.planned_sources(count) | {
            "context": torch.empty(count, read, width, dtype=self.dtype, device="meta"),
            MASK: torch.ones(count, read, dtype=torch.long, device="meta"),
        }


class QwenImageEditPlus(QwenImageEdit):
    """Several source images; the text encoder reads smaller ones than the denoiser does."""

    most_source_images = 3  # as many as the checkpoints were trained with
    read_pixels = READ_PIXELS
