"""FLUX.2 [klein] and [dev]: texts are encoded by a language model's middle layers."""

import logging
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from ....experience.vision import Conditions
from ..layers import upcast
from .base import ATTENTION_TARGETS, DiffusionFamily, decoded, encoded_mean, in_whole_batches, spatial_latent

logger = logging.getLogger(__name__)
T = torch.Tensor


class Flux2Klein(DiffusionFamily):
    """Latents (4 C, h / 2, w / 2): normalised patches of two by two, as the transformer reads them. Guided by a second
    forward."""

    default_text_length = 512
    texts_at_once = 8
    token_area = 1
    names_sigmas = True
    lora_targets = (*ATTENTION_TARGETS, "attn.to_qkv_mlp_proj")  # all projections of a single-stream block in one

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        super().__init__(pipeline, text_length)
        self.uses_negative = self.uses_negative and not pipeline.config.get("is_distilled")
        # By their whole names: a double-stream block's attn.to_out is a list.
        single = range(len(pipeline.transformer.single_transformer_blocks))
        self.lora_targets += tuple(f"single_transformer_blocks.{index}.attn.to_out" for index in single)

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """context (B, L, D); texts are padded to L, and the padding is read, as in the stock pipeline."""
        return self.context_of(prompts)

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32; guidance_scale enters where the model takes it as an embedding."""
        transformer, dtype, pipeline = self.pipeline.transformer, self.dtype, self.pipeline
        context = conditions["context"].to(dtype)
        guidance = torch.full_like(timesteps, guidance_scale) if transformer.config.guidance_embeds else None
        with latents.device:  # made on the host, the copy would wait for the device in each forward
            text_ids, ids = pipeline._prepare_text_ids(context), pipeline._prepare_latent_ids(latents)
        tokens = transformer(
            hidden_states=latents.flatten(2).transpose(1, 2).to(dtype), timestep=timesteps / 1000, guidance=guidance,
            encoder_hidden_states=context, txt_ids=text_ids, img_ids=ids, return_dict=False,
        )[0]  # fmt: skip
        return upcast(tokens.transpose(1, 2).reshape(latents.shape))

    @classmethod
    def stock_guidance(cls, pipeline: Any, scale: float, negative: str | None) -> dict[str, Any]:
        """Its pipeline takes no negative prompt. Args: as of `DiffusionFamily.stock_guidance`."""
        if negative and scale > 1 and cls.uses_negative:
            logger.warning("%s has an empty negative prompt; the run's was %r", type(pipeline).__name__, negative)
        return super().stock_guidance(pipeline, scale, negative)

    def _dynamic_shift(self, latent_shape: tuple[int, ...], num_steps: int) -> float:
        return compute_empirical_mu(self.image_tokens(latent_shape), num_steps)

    def decode(self, latents: T) -> T:
        """(B, 4 C, h / 2, w / 2) to (B, 3, H, W)."""
        vae, (mean, std) = self.pipeline.vae, self._statistics(latents)
        return decoded(vae, self.pipeline._unpatchify_latents(latents * std + mean))

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, 4 C, h / 2, w / 2): the mean of the autoencoder's answer."""
        packed = self.pipeline._patchify_latents(encoded_mean(self.pipeline.vae, images))
        mean, std = self._statistics(packed)
        return (packed - mean) / std

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(4 C, height / 16, width / 16)."""
        scale = 2 * self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels, *spatial_latent(height, width, scale, scale)

    def _statistics(self, like: T) -> tuple[T, T]:
        """Mean and standard deviation (1, 4 C, 1, 1) that the latents are normalised by."""
        vae = self.pipeline.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return tuple(values.view(1, -1, 1, 1).to(like.device, like.dtype) for values in (vae.bn.running_mean, std))


class Flux2(Flux2Klein):
    """FLUX.2 [dev]: guidance is an embedding, as in FLUX; images beside the prompt are not read."""

    uses_negative = False
