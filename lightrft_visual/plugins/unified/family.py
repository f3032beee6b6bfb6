"""Janus and Janus-Pro: one language model that reads images by a SigLIP tower and draws them by a head of its own.

An image that is read takes `<begin_of_image>`, a fixed number of placeholders and `<end_of_image>`. A prompt that ends
with `<begin_of_image>` is answered by an image: `num_image_tokens` codes of a VQ model, embedded and predicted by
modules beside the text's. Drawn tokens have the ids behind the text vocabulary's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

from ...data.rendering import ModelInput
from ...errors import ConfigError
from ...models.logprobs import LogProbLinear
from ...models.vlm.families.base import VLMFamily
from ...models.vlm.vision_cache import Drawing

T = torch.Tensor


class Janus(VLMFamily):
    """Ordinary positions, images of one size, text or images as answers."""

    draws = True
    packed = ("janus",)
    texts = ("llama",)
    towers = ("vision_model",)
    kinds = ("image",)
    vision_tokens = ("<image_placeholder>", "<begin_of_image>", "<end_of_image>")
    served = False
    heads = ("generation_head.vision_head",)
    untrained = ("vqmodel",)

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        self.tokens_per_image = config.vision_config.num_image_tokens
        self.first_drawn = config.get_text_config().vocab_size

    @classmethod
    def image_token_counts(cls, processor: ProcessorMixin, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Its placeholders between two tokens that mark begin and end."""
        return [processor.num_image_tokens + 2] * len(sizes)

    @classmethod
    def asks_for_image(cls, prompt: str, model_input: ModelInput) -> bool:
        """Whether it ends where an image begins."""
        return isinstance(model_input, ProcessorMixin) and prompt.endswith(model_input.image_start_token)

    @classmethod
    def begin_drawing(cls, prompt: str, model_input: ModelInput, where: str) -> str:
        """As the processor does with generation_mode 'image'; a whole prompt may bring it along.

        Args: as of `MediaConventions.begin_drawing`.
        """
        return prompt if cls.asks_for_image(prompt, model_input) else prompt + model_input.image_start_token

    def attach(self, base: nn.Module) -> None:
        """Drawn tokens get the embeddings of the generation side. The VQ model stays as it was trained."""
        base.vqmodel.requires_grad_(False)
        embedding = _DrawnEmbedding(base, self.first_drawn)
        base.get_input_embeddings().register_forward_pre_hook(embedding.before)
        base.get_input_embeddings().register_forward_hook(embedding.after)

    def drawing(self, transformer: PreTrainedModel) -> Drawing:
        """Raises ConfigError where the checkpoint's generation settings do not say how an image begins."""
        settings, base = transformer.generation_config, transformer.base_model
        begin = (getattr(settings, "generation_kwargs", None) or {}).get("boi_token_id")
        if begin is None or settings.pad_token_id is None:
            raise ConfigError(
                "generation_config.json of this Janus checkpoint lacks generation_kwargs.boi_token_id or pad_token_id, "
                "by which an image is begun and guided"
            )
        head = base.generation_head
        return Drawing(
            first=self.first_drawn,
            tokens=self.tokens_per_image,
            begin_id=begin,
            kept_ids=() if settings.bos_token_id is None else (settings.bos_token_id,),
            blank_id=settings.pad_token_id,
            features=lambda hidden: head.activation_fn(head.proj_out(hidden)),
            head=LogProbLinear.adopt(head.vision_head),
            pixels=partial(_decoded, base.vqmodel),
        )


def _decoded(vqmodel: nn.Module, codes: T) -> T:
    """Images of codes as `vqmodel.decode` makes them, which looks at the shape of a weight that ZeRO-3 has divided."""
    entries = nn.functional.normalize(vqmodel.quantize.embedding(codes), dim=-1)
    entries = entries.unflatten(1, vqmodel.quantize.quant_state_dims).permute(0, 3, 1, 2).contiguous()
    return vqmodel.decoder(vqmodel.post_quant_conv(entries))


class _DrawnEmbedding:
    """Hooks of the text embedding: ids from `first` on are looked up among the drawn tokens' embeddings.

    The generation side runs in every forward, and on all tokens: to choose those that are drawn would make the host
    wait for the device. Ranks stay in step by it.
    """

    def __init__(self, base: nn.Module, first: int):
        self.base, self.first = [base], first  # in a list: a hook must not make the model its own child
        self.ids: T | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.ids = args[0]
        return (torch.where(self.ids < self.first, self.ids, torch.zeros_like(self.ids)), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: T) -> T:
        base, codes, self.ids = self.base[0], self.ids - self.first, None
        made = base.generation_aligner(base.generation_embeddings(codes.clamp(min=0)))
        return torch.where((codes >= 0).unsqueeze(-1), made.to(output.dtype), output)
