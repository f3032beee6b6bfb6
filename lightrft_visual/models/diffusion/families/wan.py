"""Wan 2.1 text-to-video and Wan 2.2 image-to-video, whose two experts share the noise range."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from ....errors import ConfigError
from ....experience.vision import Conditions
from ....runtime import collectives
from ....runtime.host_copies import on_host, to_device
from ..layers import upcast
from .base import DiffusionFamily, channel_statistics, decoded, in_whole_batches, video_latent

T = torch.Tensor
ATTENTION = tuple(f"{block}.{part}" for block in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0"))


class Wan(DiffusionFamily):
    """Latents (C, F, h, w). `transformer` serves timesteps from the pipeline's boundary up, `transformer_2` below."""

    denoiser_names = ("transformer", "transformer_2")
    lora_targets = ATTENTION
    default_text_length = 512
    texts_at_once = 8
    evenly_spaced = True
    plays_at = 16.0
    module_names = {  # ROLL and DiffSynth-Studio
        "q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
    }  # fmt: skip

    @in_whole_batches
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """UMT5: context (B, L, D)."""
        return self.context_of(prompts, do_classifier_free_guidance=False)

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32, of each sample by the expert that serves its timestep. The required ones run beside those, in
        a fixed order: another rank needs them, or the optimizer a gradient of zero.

        Args: as of `DiffusionFamily.predict`.
        """
        experts = self.denoisers()
        if len(experts) == 1:
            return self._run(next(iter(experts.values())), latents, timesteps, conditions)
        chosen = self.expert_index(on_host(timesteps)).tolist()
        velocity = torch.zeros_like(latents)
        for index, (name, expert) in enumerate(experts.items()):
            rows = [row for row, each in enumerate(chosen) if each == index]
            if rows and self.required and name not in self.required and collectives.world_size() > 1:
                raise RuntimeError(
                    "a loss asks for other timesteps than its batch's: ranks agreed on those, and would hang"
                )
            if len(rows) == len(chosen):
                velocity = velocity + self._run(expert, latents, timesteps, conditions)
            elif rows:
                indices = to_device(torch.tensor(rows), latents.device)
                some = {key: value[indices] for key, value in conditions.items()}
                velocity = velocity.index_put((indices,), self._run(expert, latents[indices], timesteps[indices], some))
            elif name in self.required:
                first = {key: value[:1] for key, value in conditions.items()}
                velocity = velocity + 0 * self._run(expert, latents[:1], timesteps[:1], first)
        return velocity

    def guidance_at(self, timesteps: T, guidance_scale: float) -> float | T:
        """Each expert's own, where the second has one."""
        if self.guidance_scale_2 is None:
            return guidance_scale
        second = self.expert_index(timesteps).bool().view(-1, 1, 1, 1, 1)
        return torch.where(second, self.guidance_scale_2, guidance_scale)

    def expert_index(self, timesteps: T) -> T:
        """0 from the boundary up, 1 below; 0 where there is one network."""
        if len(self.denoisers()) == 1:
            return super().expert_index(timesteps)
        return (timesteps < self.boundary).long()

    @property
    def boundary(self) -> float:
        """Timestep from which on the high-noise expert serves. Raises ConfigError when the pipeline has none."""
        ratio = self.pipeline.config.boundary_ratio
        if ratio is None:
            raise ConfigError("the pipeline has two experts and no boundary_ratio")
        return ratio * 1000

    def _run(self, expert: torch.nn.Module, latents: T, timesteps: T, conditions: Conditions) -> T:
        dtype = expert.dtype
        first = conditions.get("first_frame")
        inputs = latents if first is None else torch.cat([latents, first.to(latents.dtype)], dim=1)
        image = conditions.get("image_context")
        return upcast(expert(
            hidden_states=inputs.to(dtype), timestep=timesteps, encoder_hidden_states=conditions["context"].to(dtype),
            encoder_hidden_states_image=None if image is None else image.to(dtype), return_dict=False,
        )[0])  # fmt: skip

    def decode(self, latents: T) -> T:
        """(B, C, F, h, w) to (B, 3, T, H, W)."""
        vae = self.pipeline.vae
        mean, std = channel_statistics(vae, latents)
        return decoded(vae, latents * std + mean)

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, (frames - 1) / 4 + 1, height / 8, width / 8). ConfigError unless frames is 4 n + 1."""
        pipeline = self.pipeline
        temporal, spatial = pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial
        multiple = spatial * self.denoisers()["transformer"].config.patch_size[-1]
        return pipeline.vae.config.z_dim, *video_latent((height, width, frames), temporal, spatial, multiple)

    def save_lora(self, folder: Path, layers: dict[str, dict[str, T]], configs: dict[str, Any]) -> None:
        """`transformer` in the folder itself, `transformer_2` in a folder of that name; load the latter with
        `load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)`.

        Args: as of `DiffusionFamily.save_lora`.
        """
        for name, weights in layers.items():
            self.pipeline.save_lora_weights(
                folder if name == "transformer" else folder / name, transformer_lora_layers=weights,
                transformer_lora_adapter_metadata=configs[name],
            )  # fmt: skip


class WanImageToVideo(Wan):
    """The first frame is a condition beside the noisy latents (Wan 2.2), for Wan 2.1 also through CLIP."""

    takes_first_frame = True

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        super().__init__(pipeline, text_length)
        if pipeline.config.expand_timesteps:
            raise ConfigError("image-to-video with expanded timesteps (Wan 2.2 5B) is not built yet; use 14B")

    @torch.no_grad()
    def encode_first_frames(self, images: list[Any], height: int, width: int, frames: int) -> Conditions:
        """first_frame (B, …) beside the latents, for Wan 2.1 also image_context of CLIP.

        Args: as of `DiffusionFamily.encode_first_frames`.
        """
        pipeline, conditions = self.pipeline, []
        for image in images:
            pixels = pipeline.video_processor.preprocess(image, height=height, width=width).to(self.device)
            _, condition = pipeline.prepare_latents(
                pixels, 1, pipeline.vae.config.z_dim, height, width, frames, torch.float32, self.device,
                torch.Generator().manual_seed(0),
            )  # fmt: skip
            conditions.append(condition)
        result = {"first_frame": torch.cat(conditions)}
        if pipeline.transformer.config.image_dim is not None:
            result["image_context"] = torch.cat([pipeline.encode_image(image, self.device) for image in images])
        return result
