"""What a transformers processor does to prompts with media: its placeholders, their expansion, its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..errors import DataError
from .imaging import Video

_VISION_NAME = re.compile("vision|image|img|video", re.IGNORECASE)
ModelInput = ProcessorMixin | PreTrainedTokenizerBase


@cache
def _parts(kind: type[ProcessorMixin]) -> frozenset[str]:
    """What a processor is made of; transformers reads it out of a signature at each call."""
    return frozenset(kind.get_attributes())


class MediaConventions:
    """How most processors of transformers handle media; the adapter of a model family overrides what its own does else.

    kinds: of media that prompts may hold.
    """

    kinds: ClassVar[tuple[str, ...]] = ("image", "video")

    @classmethod
    def placeholders(cls, model_input: ModelInput) -> dict[str, str]:
        """The text that stands for one image and for one video, by kind; empty for a text-only model's tokenizer."""
        if not isinstance(model_input, ProcessorMixin):
            return {}
        parts = _parts(type(model_input))
        return {kind: getattr(model_input, f"{kind}_token") for kind in cls.kinds if f"{kind}_processor" in parts}

    @classmethod
    def check_prompt(cls, prompt: str, images: int, videos: int, model_input: ModelInput, where: str) -> None:
        """Raise DataError, starting with `where`, unless the rendered prompt holds one placeholder a medium, and none
        where it asks for an image: models that draw do it from text alone."""
        if images and cls.asks_for_image(prompt, model_input):
            text = f"{where}: the prompt asks for an image and brings {images}; this model draws from text"
            raise DataError(text, "drawing")
        tokens = cls.placeholders(model_input)
        for kind, wanted in (("image", images), ("video", videos)):
            if kind not in tokens:
                if wanted:
                    raise DataError(f"{where}: {wanted} {kind}(s), but the model takes no {kind}s")
                continue
            found = prompt.count(tokens[kind])
            if found != wanted:
                raise DataError(
                    f"{where}: the rendered prompt holds {found} {kind} placeholder(s) {tokens[kind]}, "
                    f"but {wanted} {kind}(s) came with it"
                )

    @classmethod
    def asks_for_image(cls, prompt: str, model_input: ModelInput) -> bool:
        """Whether a rendered prompt is to be answered by an image."""
        return False

    @classmethod
    def begin_drawing(cls, prompt: str, model_input: ModelInput, where: str) -> str:
        """The rendered prompt up to where an image begins. Raises DataError, starting with `where`, where the model
        draws none."""
        raise DataError(f"{where}: the row asks for an image, but this model writes text only", "drawing")

    @classmethod
    def reserved(cls, model_input: ModelInput) -> tuple[str, ...]:
        """The special tokens that a model has for images and videos, as text; none for a text-only model's tokenizer.

        Typed into a prompt they would be read as an image that is not there.
        """
        if not isinstance(model_input, ProcessorMixin):
            return ()
        special = [token for token in model_input.tokenizer.get_added_vocab() if _VISION_NAME.search(token)]
        return (*cls.placeholders(model_input).values(), *special)

    @classmethod
    def image_token_counts(cls, processor: ProcessorMixin, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens that images of these (width, height) take in the prompt, without decoding any."""
        # The method vLLM's transformers backend relies on; there is no public one.
        counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in sizes])
        return list(counts["num_image_tokens"])

    @classmethod
    def media_arguments(cls, images: Sequence[Any], videos: Sequence[Video]) -> dict[str, Any]:
        """Keyword arguments with which a processor takes the media of its prompts; frames are already chosen."""
        arguments: dict[str, Any] = {"images": list(images)} if images else {}
        if videos:
            given = [
                {key: value for key, value in each.metadata.items() if key != "do_sample_frames"} for each in videos
            ]
            arguments |= {
                "videos": [each.frames for each in videos],
                "video_metadata": given,
                "do_sample_frames": False,
            }
        return arguments
