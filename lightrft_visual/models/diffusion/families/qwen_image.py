"""Qwen-Image."""

from typing import Any

import torch

from ....experience.vision import MASK, Conditions, used_widths, widened
from .base import Grid, PackedLatents, channel_statistics, decoded, encoded_mean, pack, unpack

T = torch.Tensor
TEXT_STEP = 64  # tokens


def in_steps(context: T, mask: T) -> tuple[T, T]:
    """Texts (B, L, D) and their mask (B, L), cut or widened to what the longest one takes, in steps of `TEXT_STEP`."""
    used = -(-max(used_widths(mask)) // TEXT_STEP) * TEXT_STEP
    return widened(context[:, :used], used), widened(mask[:, :used], used)


class QwenImage(PackedLatents):
    """Guidance keeps the norm of every token, as the stock pipeline does.

    Texts are kept by their own lengths, and padded and masked where samples of several prompts are one batch. A forward
    reads as much of them as its longest text takes, in steps of `TEXT_STEP`: nearly always the same for all batches,
    as sums over another number of masked places round differently.
    """

    default_text_length = 1024
    names_sigmas = True
    takes_graphs = False

    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """context (B, L, D) and its mask (B, L), padded to the longest of these texts."""
        return self._encoded(prompts, **({"max_sequence_length": self.text_length} if self.text_length else {}))

    def _encoded(self, prompts: list[str], **asked: Any) -> Conditions:
        context, mask, *_ = self.pipeline.encode_prompt(prompts, device=self.device, **asked)
        if mask is None:  # the pipeline leaves it out where no text is padded
            mask = torch.ones(context.shape[:2], dtype=torch.long, device=context.device)
        return {"context": context, MASK: mask}

    def _tokens(self, tokens: T, grids: list[Grid], timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        transformer, dtype = self.pipeline.transformer, self.dtype
        context, mask = in_steps(conditions["context"], conditions[MASK])
        guidance = torch.full_like(timesteps, guidance_scale) if transformer.config.guidance_embeds else None
        return transformer(
            hidden_states=tokens.to(dtype), timestep=timesteps / 1000, guidance=guidance,
            encoder_hidden_states=context.to(dtype), encoder_hidden_states_mask=mask,
            img_shapes=[grids] * len(tokens), return_dict=False,
        )[0]  # fmt: skip

    def combine(self, without: T, with_prompt: T, guidance_scale: float) -> T:
        """Guided, with the norm of every token that the guided branch has."""
        guided, wanted = pack(super().combine(without, with_prompt, guidance_scale)), pack(with_prompt)
        scaled = guided * (wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True).clamp_min(1e-12))
        return unpack(scaled, *without.shape[-2:])

    @classmethod
    def stock_guidance(cls, pipeline: Any, scale: float, negative: str | None) -> dict[str, Any]:
        """Its guidance_scale is an embedding, and without a negative prompt it does not guide.

        Args: as of `DiffusionFamily.stock_guidance`.
        """
        return {"true_cfg_scale": scale, "negative_prompt": negative or ""}

    def decode(self, latents: T) -> T:
        """(B, C, h, w) to (B, 3, H, W)."""
        vae = self.pipeline.vae
        mean, std = channel_statistics(vae, latents)
        return decoded(vae, latents[:, :, None] * std + mean)[:, :, 0]

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, C, h, w): the mean of the autoencoder's answer."""
        frames = encoded_mean(self.pipeline.vae, images[:, :, None])
        mean, std = channel_statistics(self.pipeline.vae, frames)
        return ((frames - mean) / std)[:, :, 0]
