"""HunyuanVideo 1.5, text to video."""

from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ....experience.vision import MASK, Conditions
from ..layers import upcast
from .base import DiffusionFamily, decoded, in_whole_batches, video_latent
from .qwen_image import in_steps

T = torch.Tensor


def _as_of_one_sample(_: nn.Module, inputs: tuple[T]) -> tuple[T]:
    """diffusers parts image and text by slices: from what is not contiguous a bias is rounded otherwise in bf16."""
    return (inputs[0].contiguous(),)


class HunyuanVideo15(DiffusionFamily):
    """Latents (C, F, h, w). A language model reads the text, and ByT5 what it quotes, which is to be written.

    Texts are kept by their own lengths, as those of Qwen-Image are. `glyphs` (B, D, G) lie with their channels first:
    they are not as long as the text is.
    """

    default_text_length = 1000
    text_length_at = "tokenizer_max_length"
    texts_at_once = 8
    evenly_spaced = True
    plays_at = 24.0
    names_sigmas = True
    takes_graphs = False

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        super().__init__(pipeline, text_length)
        pipeline.tokenizer_max_length = self.text_length
        for block in pipeline.transformer.transformer_blocks:
            for projection in (block.attn.to_out[0], block.attn.to_add_out):
                projection.register_forward_pre_hook(_as_of_one_sample)

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """context (B, L, D) and mask (B, L); glyphs (B, D', G) and glyph_mask (B, 1, G)."""
        context, mask, glyphs, glyph_mask = self.pipeline.encode_prompt(
            list(prompts), self.device, batch_size=len(prompts)
        )
        return {
            "context": context, MASK: mask.long(), "glyphs": glyphs.transpose(1, 2).contiguous(),
            "glyph_mask": glyph_mask[:, None].long(),
        }  # fmt: skip

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32. Where a first frame's latents and image tokens would be there are zeros."""
        transformer, dtype = self.pipeline.transformer, self.dtype
        context, mask = in_steps(conditions["context"], conditions[MASK])
        frame = torch.zeros_like(latents), torch.zeros_like(latents[:, :1])
        return upcast(transformer(
            hidden_states=torch.cat([latents, *frame], dim=1).to(dtype), timestep=timesteps.to(dtype),
            encoder_hidden_states=context.to(dtype), encoder_attention_mask=mask.to(dtype),
            encoder_hidden_states_2=conditions["glyphs"].transpose(1, 2).to(dtype),
            encoder_attention_mask_2=conditions["glyph_mask"][:, 0].to(dtype),
            image_embeds=latents.new_zeros(len(latents), 1, transformer.config.image_embed_dim, dtype=dtype),
            return_dict=False,
        )[0])  # fmt: skip

    @classmethod
    def stock_guidance(cls, pipeline: Any, scale: float, negative: str | None) -> dict[str, Any]:
        """The scale is the guider's, which is a part of the pipeline. Args: as of `DiffusionFamily.stock_guidance`."""
        pipeline.guider = pipeline.guider.new(guidance_scale=max(scale, 1.0))
        return {"negative_prompt": negative}

    def decode(self, latents: T) -> T:
        """(B, C, F, h, w) to (B, 3, T, H, W), one by one: the causal mask of this autoencoder fits one video."""
        vae = self.pipeline.vae
        return torch.cat([decoded(vae, one) for one in (latents / vae.config.scaling_factor).split(1)])

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, (frames - 1) / 4 + 1, height / 16, width / 16). ConfigError unless frames is 4 n + 1."""
        pipeline = self.pipeline
        temporal, spatial = pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial
        multiple = spatial * pipeline.transformer.config.patch_size
        return pipeline.vae.config.latent_channels, *video_latent((height, width, frames), temporal, spatial, multiple)
