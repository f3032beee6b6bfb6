"""Emu3: one vocabulary for words and codes of a VQ model, in prompts as in answers.

An image is H rows of W codes, each row with a token of its own at its end (arXiv 2409.18869). A prompt that ends with
`<|image start|>H*W<|image token|>` is answered by one; the ends of its rows are given, not sampled. An image that is
read is coded by the same VQ model, and its codes stand where the processor puts placeholders. What codes an image is
frozen, so the language model is all that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param, register_external_parameter
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ....data.placeholders import ModelInput
from ....errors import ConfigError, DataError
from ....experience.model_inputs import ModelInputs
from ....experience.vision import VisionTensors
from ....runtime import collectives
from ...logprobs import LogProbLinear
from ..drawing import CodesOfHead, Drawing
from ..vision_cache import first_occurrences
from .base import VLMFamily, as_tensor

T = torch.Tensor
IMAGE_AREA = 720 * 720  # pixels, as the processor's own default
_NAMES = {
    "begin": "<|image start|>", "row_end": "<|extra_200|>", "first": "<|visual token 000000|>", "image": "<image>",
}  # fmt: skip


class Emu3(VLMFamily):
    """Ordinary positions, images of any size in prompts, text or images as answers.

    pixel_values (patches, 3 * 8 * 8) and image_grid_thw (images, 3) hold what is read, a patch for each code. An image
    that is drawn has 720 x 720 pixels, or `image_area` of the model's and of the image processor's configuration.
    """

    draws = True
    packed = ("emu3",)
    towers = ("vqmodel",)
    projectors = ()
    kinds = ("image",)
    vision_tokens = ("<image>", "<|image start|>", "<|image end|>", "<|image token|>", "<|extra_200|>", "<|extra_201|>")
    untrained = ("vqmodel",)
    tensors = ("pixel_values", "image_sizes")
    media = {}  # there is no tower whose part of a forward other ranks would wait for
    coder = "vqmodel"
    code_side = 8  # as the processor counts placeholders
    largest_image = 1024 * 1024

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        missing = sorted(set(_NAMES.values()) - set(config.vocabulary_map or {}))
        if missing:
            raise ConfigError(f"vocabulary_map of this Emu3 checkpoint's config.json lacks {', '.join(missing)}")
        self.ids = {name: config.vocabulary_map[text] for name, text in _NAMES.items()}
        self.image_token_id = self.ids["image"]
        self.vqmodel: list[nn.Module] = []  # in a list, as it is no part of this adapter
        self.codes = config.vq_config.codebook_size
        last = config.vocabulary_map.get(f"<|visual token {self.codes - 1:06d}|>")
        if last != self.ids["first"] + self.codes - 1:
            raise ConfigError(
                f"the visual tokens of this Emu3 checkpoint are not {self.codes} ids in order behind "
                f"{self.ids['first']}: {_NAMES['first']} to the last have to follow each other in vocabulary_map"
            )

    @classmethod
    def processor_arguments(cls, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """None: the processor is given no bounds in a call."""
        if min_pixels is not None or max_pixels is not None:
            raise ConfigError(
                "min_pixels and max_pixels: Emu3's processor reads them from preprocessor_config.json alone; set them "
                "there"
            )
        return {}

    @classmethod
    def read(cls, output: Mapping[str, Any], images: Sequence[int], videos: Sequence[int]) -> list[VisionTensors]:
        """The processor pads images of several sizes to one; each is cut into the patches of its codes here."""
        patches, grids = [], []
        for pixels, size in zip(output.get("pixel_values", ()), output.get("image_sizes", ())):
            height, width = (int(each) for each in size)
            own = as_tensor(pixels)[:, :height, :width].float()
            side = cls.code_side
            cut = own.unfold(1, side, side).unfold(2, side, side)  # (3, rows, columns, side, side)
            patches.append(cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1))
            grids.append((1, *cut.shape[1:3]))
        if not grids:
            return [VisionTensors() for _ in images]
        joined = VisionTensors.of(pixel_values=torch.cat(patches), image_grid_thw=torch.tensor(grids))
        shares = joined.shared_out(len(images), {"image": images, "video": videos})
        return [VisionTensors([share]) for share in shares]

    @property
    def _area(self) -> int:
        """Pixels of an image that the model draws."""
        return self.config.to_dict().get("image_area", IMAGE_AREA)

    def banned_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Also the codes, which no text holds."""
        codes = range(self.ids["first"], self.ids["first"] + self.codes)
        return sorted({*super().banned_ids(tokenizer), *codes})

    @classmethod
    def prompt_prefix(cls, model_input: ModelInput) -> str:
        """The token that begins every prompt, as text."""
        return model_input.bos_token

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
        """Both sizes of an image, and of a code; and what begins a prompt, in whose place "None" would be written."""
        if processor.bos_token is None:
            raise ConfigError("the tokenizer of this Emu3 checkpoint has no bos_token, with which each prompt begins")
        sides = 2 ** (len(self.config.vq_config.channel_multiplier) - 1), processor.downsample_ratio
        factor, wanted = processor.image_processor.spatial_factor, self.code_side
        if set(sides) != {wanted} or factor % wanted:
            raise ConfigError(
                f"a code of this Emu3 checkpoint's VQ model is {sides[0]} pixels wide, its processor counts {sides[1]} "
                f"and resizes images to multiples of {factor}; these have to be {wanted}, {wanted} and a multiple of "
                f"{wanted}"
            )
        model, asked = self._area, _area(processor)
        if model != asked:
            raise ConfigError(
                f"image_area is {model} in this Emu3 checkpoint's config.json and {asked} in its "
                "preprocessor_config.json: write the same number into both"
            )

    def attach(self, base: nn.Module) -> None:
        """The VQ model stays as it was trained."""
        base.vqmodel.requires_grad_(False)
        self.vqmodel = [base.vqmodel]

    def feature_count(self, sample: Mapping[str, T]) -> int:
        """Codes, and the ends of their rows."""
        grids = sample.get("image_grid_thw")
        return 0 if grids is None else int((grids[:, 1] * (grids[:, 2] + 1)).sum())

    def arguments(self, inputs: ModelInputs, types: T) -> dict[str, Any]:
        """The ids, codes in the places of placeholders."""
        return {"input_ids": inputs.sequences.masked_scatter(types == 1, self._codes(inputs))}

    @torch.no_grad()
    def _codes(self, inputs: ModelInputs) -> T:
        """(image tokens) ids of all images in order, ends of rows among them.

        Each different image is coded once and by itself, so that its codes do not depend on others. Under ZeRO-3 a call
        gathers weights from all ranks, and all of them make as many calls.
        """
        pixels, grids = inputs.vision.get("pixel_values"), inputs.vision.get("image_grid_thw")
        none = grids is None or not len(grids)
        first = [] if none else first_occurrences(pixels, grids)
        blocks = () if none else pixels.split(grids.prod(dim=1).tolist())
        kept, device = sorted(set(first)), inputs.sequences.device
        quantiser, divided = self.vqmodel[0].quantize, is_zero_param(next(self.vqmodel[0].parameters()))
        if divided:  # its forward reads the weight of a module inside without calling that
            register_external_parameter(quantiser, quantiser.embedding.weight)
        # Before the first call, which waits for the other ranks.
        most = int(collectives.all_reduce_max(torch.tensor([len(kept)])).item()) if divided else len(kept)
        made = {index: self._coded(blocks[index], *grids[index, 1:].tolist()) for index in kept}
        for _ in range(most - len(kept)):
            self._coded(torch.zeros(1, 3 * self.code_side**2, device=device), 1, 1)
        return torch.cat([made[index] for index in first]) if first else inputs.sequences.new_zeros(0)

    def _coded(self, patches: T, rows: int, columns: int) -> T:
        """(rows * (columns + 1)) ids of one image of patches (rows * columns, 3 * 8 * 8)."""
        side = self.code_side
        cut = patches.view(rows, columns, -1, side, side).permute(2, 0, 3, 1, 4)
        image = cut.reshape(1, -1, rows * side, columns * side)
        vqmodel = self.vqmodel[0].eval()  # in training mode it normalises by this image, and changes its own averages
        codes = vqmodel.encode(image, [image.shape[2:]]).image_tokens[0]
        ends = codes.new_full((rows, 1), self.ids["row_end"])
        return torch.cat([codes + self.ids["first"], ends], dim=1).flatten().long()

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
