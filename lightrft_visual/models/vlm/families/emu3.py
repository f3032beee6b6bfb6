"""Emu3: one vocabulary for words and codes of a VQ model, and answers that are text or images.

A prompt that ends with `<|image start|>H*W<|image token|>` is answered by an image of H rows of W codes, each row with
a token of its own at its end, which is given and not sampled (arXiv 2409.18869). Images in prompts are not taken: what
reads images is another checkpoint, whose prompts hold codes in place of features.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ....data.placeholders import ModelInput
from ....errors import ConfigError, DataError
from ...logprobs import LogProbLinear
from ..drawing import CodesOfHead, Drawing
from .base import VLMFamily

T = torch.Tensor
IMAGE_AREA = 720 * 720  # pixels, as the processor's own default
_NAMES = {"begin": "<|image start|>", "row_end": "<|extra_200|>", "first": "<|visual token 000000|>"}


class Emu3(VLMFamily):
    """Ordinary positions, no images in prompts, text or images as answers.

    An image has 720 x 720 pixels, or `image_area` of the model's and of the image processor's configuration.
    """

    draws = True
    packed = ("emu3",)
    towers = ("vqmodel",)
    projectors = ()
    kinds = ()
    vision_tokens = ("<image>", "<|image start|>", "<|image end|>", "<|image token|>", "<|extra_200|>", "<|extra_201|>")
    served = False
    untrained = ("vqmodel",)
    media = {}

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        missing = sorted(set(_NAMES.values()) - set(config.vocabulary_map or {}))
        if missing:
            raise ConfigError(f"vocabulary_map of this Emu3 checkpoint's config.json lacks {', '.join(missing)}")
        self.ids = {name: config.vocabulary_map[text] for name, text in _NAMES.items()}
        self.codes = config.vq_config.codebook_size
        last = config.vocabulary_map.get(f"<|visual token {self.codes - 1:06d}|>")
        if last != self.ids["first"] + self.codes - 1:
            raise ConfigError(
                f"the visual tokens of this Emu3 checkpoint are not {self.codes} ids in order behind "
                f"{self.ids['first']}: {_NAMES['first']} to the last have to follow each other in vocabulary_map"
            )

    @property
    def _area(self) -> int:
        """Pixels of an image that the model draws."""
        return self.config.to_dict().get("image_area", IMAGE_AREA)

    def banned_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Also the codes, which no text holds."""
        codes = range(self.ids["first"], self.ids["first"] + self.codes)
        return sorted({*super().banned_ids(tokenizer), *codes})

    @classmethod
    def asks_for_image(cls, prompt: str, model_input: ModelInput) -> bool:
        """Whether it ends with the size of an image."""
        return isinstance(model_input, ProcessorMixin) and prompt.endswith(model_input.fake_token_around_image)

    @classmethod
    def begin_drawing(cls, prompt: str, model_input: ModelInput, where: str) -> str:
        """As the processor does with return_for_image_generation; a whole prompt may bring it along."""
        return prompt if cls.asks_for_image(prompt, model_input) else prompt + _size(model_input)

    @classmethod
    def check_prompt(cls, prompt: str, images: int, videos: int, model_input: ModelInput, where: str) -> None:
        """Also that prompts which ask for an image ask for one of the size that is drawn."""
        if cls.asks_for_image(prompt, model_input) and not prompt.endswith(_size(model_input)):
            begun = prompt.rpartition(model_input.image_start_token)[2]
            raise DataError(
                f"{where}: the prompt asks for an image by {begun!r}; this model draws squares, {_size(model_input)!r}",
                "drawing",
            )
        super().check_prompt(prompt, images, videos, model_input, where)

    def check_processor(self, processor: ProcessorMixin) -> None:
        """Both sizes of an image."""
        model, asked = self._area, _area(processor)
        if model != asked:
            raise ConfigError(
                f"image_area is {model} in this Emu3 checkpoint's config.json and {asked} in its "
                "preprocessor_config.json: write the same number into both"
            )

    def attach(self, base: nn.Module) -> None:
        """The VQ model stays as it was trained."""
        base.vqmodel.requires_grad_(False)

    def drawing(self, transformer: PreTrainedModel) -> Drawing:
        """How it draws squares of its configuration's area."""
        base, settings = transformer.base_model, transformer.generation_config
        side = round(self._area**0.5 / base.vqmodel.spatial_scale_factor)
        text = self.config.get_text_config()
        bos = text.bos_token_id if settings.bos_token_id is None else settings.bos_token_id
        return Drawing(
            first=self.ids["first"],
            tokens=side * (side + 1),
            begin_id=self.ids["begin"],
            kept_ids=(bos,),
            blank_id=text.pad_token_id if settings.pad_token_id is None else settings.pad_token_id,
            features=nn.Identity(),
            head=CodesOfHead(LogProbLinear.adopt(transformer.get_output_embeddings()), self.ids["first"], self.codes),
            pixels=partial(_decoded, base.vqmodel, side),
            row=side,
            row_end=self.ids["row_end"],
        )


def _area(processor: ProcessorMixin) -> int:
    return processor.image_processor.to_dict().get("image_area", IMAGE_AREA)


def _size(processor: ProcessorMixin) -> str:
    """With which a prompt asks for an image."""
    height, width = processor.calculate_generate_size("1:1", _area(processor), processor.downsample_ratio)
    return f"{processor.image_start_token}{height}*{width}{processor.fake_token_around_image}"


def _decoded(vqmodel: nn.Module, side: int, codes: T) -> T:
    return vqmodel.decode(codes.unflatten(1, (side, side)))
