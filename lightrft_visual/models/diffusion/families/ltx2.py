"""LTX-2, text to video, without its sound.

One transformer has a stream of video tokens and one of sound, which look at each other in each block. Here they do not
(`isolate_modalities`, as in the pipeline's guidance by modality and in its authors' training on videos alone), so a
velocity depends on the video and its text only. The classes ask for sound nevertheless: it is one token of zeros, the
same in rollout and replay, and no part of a sample. The weights that only sound reads stay as they are.
"""

from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from ....errors import ConfigError
from ....experience.vision import Conditions
from ..layers import upcast
from .base import DiffusionFamily, decoded, video_latent
from .wan import ATTENTION

T = torch.Tensor


class LTX2(DiffusionFamily):
    """Latents (C, F, h, w), normalised as in the pipeline; a token is one position of them.

    Gemma pads texts in front to `text_length`, and the connectors, frozen as Gemma is, put learned registers in the
    place of padding: all tokens count, and none is masked. Guidance is that of the text alone: the pipeline's further
    kinds (of blocks left out, of sound, rescaled) are not applied.
    """

    lora_targets = ATTENTION
    divided_attention = ".attn1"  # diffusers' backward exchanges as many keys as queries: not so where texts are read
    left_out = r".*(audio|a2v|av_cross|keyframes).*"
    default_text_length = 1024
    names_sigmas = True
    takes_graphs = False
    frame_rate = 24.0  # positions in time are seconds

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        super().__init__(pipeline, text_length)
        registers = pipeline.connectors.config.video_connector_num_learnable_registers
        if registers is None:
            raise ConfigError("this LTX-2 has no registers for the padding of texts, which is not proven here")
        if self.text_length % registers:
            raise ConfigError(f"max_sequence_length {self.text_length} must be a multiple of {registers} for LTX-2")
        self.context_plan = _plan(pipeline.transformer.config.rope_type)

    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """Gemma's layers through the connector of videos: context (B, L, D)."""
        pipeline = self.pipeline
        states, mask, *_ = pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=self.text_length, device=self.device
        )
        context, *_ = pipeline.connectors(states, mask, padding_side=pipeline.tokenizer.padding_side)
        return {"context": context}

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        transformer, dtype, (frames, height, width) = self.pipeline.transformer, self.dtype, latents.shape[2:]
        sound, sound_text = self._silence(latents.new_zeros(len(latents), 1, 1, dtype=dtype))
        tokens, _ = transformer(
            hidden_states=latents.flatten(2).transpose(1, 2).to(dtype), audio_hidden_states=sound,
            encoder_hidden_states=conditions["context"].to(dtype), audio_encoder_hidden_states=sound_text,
            timestep=timesteps, sigma=timesteps, num_frames=frames, height=height, width=width, fps=self.frame_rate,
            audio_num_frames=1, isolate_modalities=True, return_dict=False,
        )  # fmt: skip
        return upcast(tokens).transpose(1, 2).reshape(latents.shape)

    def _silence(self, zero: T) -> tuple[T, T]:
        """One token of sound and one of its text, from (B, 1, 1): the least that the transformer's rotations take."""
        config = self.pipeline.transformer.config
        text = config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim
        return zero.expand(-1, -1, config.audio_in_channels), zero.expand(-1, -1, text)

    def decode(self, latents: T) -> T:
        """(B, C, F, h, w) to (B, 3, T, H, W). A decoder that reads a timestep is told 0, as by the pipeline."""
        vae = self.pipeline.vae
        mean, std = (each.to(latents).view(1, -1, 1, 1, 1) for each in (vae.latents_mean, vae.latents_std))
        time = latents.new_zeros(len(latents), dtype=vae.dtype) if vae.config.timestep_conditioning else None
        return decoded(vae, latents * std / vae.config.scaling_factor + mean, time)

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, (frames - 1) / 8 + 1, height / 32, width / 32). ConfigError unless frames is 8 n + 1."""
        pipeline = self.pipeline
        temporal, spatial = pipeline.vae_temporal_compression_ratio, pipeline.vae_spatial_compression_ratio
        size = video_latent((height, width, frames), temporal, spatial, spatial)
        mirrors = pipeline.vae.config.decoder_spatial_padding_mode == "reflect"  # which takes two latents a side
        if mirrors and min(size[1:]) < 2:
            raise ConfigError(f"height {height} and width {width} must be at least {2 * spatial} for this model")
        return pipeline.transformer.config.in_channels, *size

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """One a position."""
        return latent_shape[-1] * latent_shape[-2] * latent_shape[-3]


def _plan(rope_type: str) -> dict[str, Any]:
    """As diffusers has it, but for texts, which stay whole, and for rotations by heads (B, H, N, D), which do not."""
    axis = 2 if rope_type == "split" else 1
    tokens = ContextParallelInput(split_dim=1, expected_dims=3, split_output=False)
    angles = ContextParallelInput(split_dim=axis, expected_dims=axis + 2, split_output=True)
    gathered = ContextParallelOutput(gather_dim=1, expected_dims=3)
    return {"": {"hidden_states": tokens}, "rope": {0: angles, 1: angles}, "proj_out": gathered}
