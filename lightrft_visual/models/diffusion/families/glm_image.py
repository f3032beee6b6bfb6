"""GLM-Image, a model of two parts: an autoregressive half draws tokens, a diffusion half the image from them.

The first half is `vision_language_encoder` of the pipeline, a transformers model. Either half trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ....errors import DataError
from ....experience.conditions import MASK, NEGATIVE, Conditions
from ...attention import attend_by_segments
from ...exact import exact_products
from ..schedule import flow_match_schedule, upcast
from .base import DiffusionFamily, by_kind, encoded_mean, save_transformer_lora, spatial_latent

T = torch.Tensor
SIDE = 32  # pixels of a drawn token
ASKED_LENGTH = 2048  # most tokens of a prompt


class GlmImage(DiffusionFamily):
    """Latents (C, h, w). `prior` (B, 1, L) are the tokens of the first half, `prior_drop` (B) where they are hidden.

    The texts that an image shows, those in quotes, are encoded letter by letter. The transformer has no mask that hides
    padding, so a forward takes samples whose texts are equally long.
    """

    default_text_length = 2048
    lora_targets = tuple(f"attn1.{name}" for name in ("to_k", "to_out.0", "to_q", "to_v"))
    first_part = "vision_language_encoder"
    first_lora_targets = ("k_proj", "o_proj", "q_proj", "v_proj")

    def train_first(self) -> None:
        """Its tokens' log-probs are then compared: attention and products on the host are in float64."""
        super().train_first()
        encoder = self.pipeline.vision_language_encoder
        attend_by_segments(encoder.model, exact=True)
        exact_products(encoder, but=("visual", "vqmodel"))

    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """context (B, L, D) and mask (B, L) of the texts in quotes; a prompt by itself."""
        context, _ = self.pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=self.text_length, device=self.device
        )
        return {"context": context, MASK: torch.ones(context.shape[:2], dtype=torch.long, device=context.device)}

    @torch.no_grad()
    def first_half(self, prompts: list[str], seeds: list[int], height: int, width: int) -> Conditions:
        """prior (B, 1, L), and what guidance hides of them. A small image's tokens come first, then those kept.

        Where this half trains, also `drawn` (B, 1, N), all tokens, their log-probs, and what was asked: then tokens are
        sampled at the checkpoint's temperature without its top_k and top_p, which leave no density.
        """
        pipeline, encoder = self.pipeline, self.pipeline.vision_language_encoder
        asked = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
        inputs = pipeline.processor.apply_chat_template(
            asked, tokenize=True, padding=len(asked) > 1, target_h=height, target_w=width, return_dict=True,
            return_tensors="pt",
        ).to(encoder.device)  # fmt: skip
        grids = inputs["image_grid_thw"][: len(inputs["image_grid_thw"]) // len(prompts)]
        ended, start, rows, columns = pipeline._compute_generation_params(grids, is_text_to_image=True)
        codes = pipeline.transformer.config.prior_vq_quantizer_codebook_size
        noise = OwnNoise(encoder.generation_config, codes, seeds, whole=self.trains_first)
        sampling = LogitsProcessorList([noise])
        made = encoder.generate(**inputs, max_new_tokens=ended - 1, do_sample=False, logits_processor=sampling)
        drawn = made[:, inputs["input_ids"].shape[1] :]
        kept = drawn[:, start : start + rows * columns]
        tokens = torch.stack([pipeline._upsample_token_ids(each, rows, columns) for each in kept])
        shown = torch.zeros(len(prompts), dtype=torch.long, device=tokens.device)
        found = {"prior": tokens, "prior_drop": shown, f"{NEGATIVE}prior_drop": torch.ones_like(shown)}
        if not self.trains_first:
            return found
        lengths = inputs["attention_mask"].sum(dim=1)
        asked = torch.stack([_fixed(ids[-int(n) :]) for ids, n in zip(inputs["input_ids"], lengths)])
        grids = grids.flatten().expand(len(prompts), 1, -1)
        log_probs = torch.stack(noise.log_probs, dim=1)
        own = {"drawn": drawn[:, None], "drawn_log_probs": log_probs[:, None], "asked": asked[:, None], "grids": grids}
        return found | own | {"asked_length": lengths}

    def token_log_probs(self, conditions: Conditions) -> T:
        """(B, N) fp32 of `drawn`, at the temperature that it was sampled with."""
        encoder = self.pipeline.vision_language_encoder
        drawn, lengths = conditions["drawn"][:, 0], conditions["asked_length"]
        width = int(lengths.max())
        ids = torch.stack([ids[0, :width].roll(width - int(n)) for ids, n in zip(conditions["asked"], lengths)])
        mask = (torch.arange(width, device=ids.device) >= width - lengths[:, None]).long()
        places, _ = encoder.model.get_rope_index(
            ids, image_grid_thw=conditions["grids"].reshape(-1, 3), attention_mask=mask,
            images_per_sample=torch.full_like(lengths, conditions["grids"].shape[-1] // 3),
        )  # fmt: skip
        later = encoder.model._cached_decode_position_ids[:, :, : drawn.shape[1]].permute(1, 0, 2)
        logits = encoder(
            input_ids=torch.cat([ids, drawn], dim=1), attention_mask=torch.cat([mask, torch.ones_like(drawn)], dim=1),
            position_ids=torch.cat([places, later], dim=2), use_cache=False, logits_to_keep=drawn.shape[1] + 1,
        ).logits[:, :-1]  # fmt: skip
        codes = self.pipeline.transformer.config.prior_vq_quantizer_codebook_size
        scores = logits[..., :codes].float() / (encoder.generation_config.temperature or 1.0)
        return scores.log_softmax(dim=-1).gather(2, drawn[..., None])[..., 0]

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32."""
        lengths = conditions[MASK].sum(dim=1).tolist()
        return by_kind(lengths, self._run, latents, timesteps, conditions)

    def _run(self, length: int, latents: T, timesteps: T, conditions: Conditions) -> T:
        """Velocity of samples whose texts have one length."""
        dtype, scale = self.dtype, self.pipeline.vae_scale_factor
        prior = conditions["prior"][:, 0]
        pixels = [side * scale for side in latents.shape[-2:]]
        size = torch.tensor([pixels], dtype=dtype, device=latents.device).expand(len(latents), 2)
        return upcast(self.pipeline.transformer(
            hidden_states=latents.to(dtype), encoder_hidden_states=conditions["context"][:, :length].to(dtype),
            prior_token_id=prior, prior_token_drop=conditions["prior_drop"].bool()[:, None].expand_as(prior),
            timestep=timesteps - 1, target_size=size, crop_coords=torch.zeros_like(size), return_dict=False,
        )[0])  # fmt: skip

    def default_schedule(self, num_steps: int, latent_shape: tuple[int, ...], flow_shift: float | None) -> tuple[T, T]:
        """As the pipeline has it: the model is told evenly spaced timesteps, and moves by shifted sigmas."""
        if flow_shift is not None:
            return flow_match_schedule(num_steps, flow_shift)
        scheduler = self.pipeline.scheduler
        whole = scheduler.config.num_train_timesteps
        timesteps = np.linspace(whole, 1.0, num_steps + 1)[:-1].astype(np.int64).astype(np.float32)
        scheduler.set_timesteps(timesteps=timesteps, sigmas=timesteps / whole, mu=self._dynamic_shift(latent_shape))
        return scheduler.timesteps.clone().float(), scheduler.sigmas[:-1].clone().float()

    def _dynamic_shift(self, latent_shape: tuple[int, ...]) -> float:
        config = self.pipeline.scheduler.config
        return calculate_shift(
            self.image_tokens(latent_shape), config.get("base_image_seq_len", 256), config.get("base_shift", 0.25),
            config.get("max_shift", 0.75),
        )  # fmt: skip

    def decode(self, latents: T) -> T:
        """(B, C, h, w) to (B, 3, H, W)."""
        vae, (mean, std) = self.pipeline.vae, self._statistics(latents)
        return upcast(vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]) / 2 + 0.5

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, C, h, w): the mean of the autoencoder's answer."""
        latents = encoded_mean(self.pipeline.vae, images)
        mean, std = self._statistics(latents)
        return (latents - mean) / std

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 8, width / 8). ConfigError unless both sides are whole tokens."""
        channels = self.pipeline.transformer.config.in_channels
        return channels, *spatial_latent(height, width, self.pipeline.vae_scale_factor, SIDE)

    def save_lora(self, folder: Path, layers: dict[str, dict[str, T]], configs: dict[str, Any]) -> None:
        """See `save_transformer_lora`; that of the first half, for `load_adapter`, in a folder of its name."""
        if self.first_part in layers:
            self.pipeline.vision_language_encoder.save_pretrained(folder / self.first_part)
        else:
            save_transformer_lora(folder, layers, configs)

    def _statistics(self, like: T) -> tuple[T, ...]:
        """Mean and standard deviation (1, C, 1, 1) that the latents are normalised by."""
        config = self.pipeline.vae.config
        return tuple(
            torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )


class OwnNoise(LogitsProcessor):
    """Lets greedy decoding sample: noise of each sample's own seed is added, and the largest sum is a fair draw
    (Gumbel). Ids from `codes` on, which are no image, are never drawn. whole: top_k and top_p do not cut.

    log_probs: of each token drawn so far, (B) fp32."""

    def __init__(self, settings: GenerationConfig, codes: int, seeds: list[int], whole: bool = False) -> None:
        self.codes = codes
        self.log_probs: list[T] = []
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.warpers: list[Any] = [TemperatureLogitsWarper(settings.temperature)] if settings.temperature else []
        if settings.top_k and not whole:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p is not None and settings.top_p < 1 and not whole:
            self.warpers.append(TopPLogitsWarper(settings.top_p))

    def __call__(self, input_ids: T, scores: T) -> T:
        """(B, V) scores, the noise added."""
        scores = scores.clone()
        scores[:, self.codes :] = float("-inf")
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        shape = scores.shape[1:]
        uniform = [torch.rand(shape, generator=each, dtype=torch.float64) for each in self.generators]
        noisy = scores - torch.stack(uniform).log().neg().log().to(scores)
        chosen = noisy.argmax(dim=-1, keepdim=True)
        self.log_probs.append(scores.float().log_softmax(dim=-1).gather(1, chosen)[:, 0])
        return noisy


def _fixed(ids: T) -> T:
    """Ids (S) behind each other, zeros after them: as long for every prompt, so that samples make a batch."""
    if len(ids) > ASKED_LENGTH:
        raise DataError(f"a prompt has {len(ids)} tokens; the first half is trained on at most {ASKED_LENGTH}")
    return torch.nn.functional.pad(ids, (0, ASKED_LENGTH - len(ids)))
