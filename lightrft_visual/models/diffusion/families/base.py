"""What a diffusion family must say about itself; one small subclass a file. All latents are fp32 at this boundary."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.loaders.lora_pipeline import CosmosLoraLoaderMixin
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline, calculate_shift
from peft.tuners.lora import LoraLayer
from torch import nn

from ....config.diffusion import LORA, DiffusionRunConfig, lora_folders
from ....errors import ConfigError, did_you_mean, refused_as
from ....experience.diffusion_sampling import TRAIN_TIMESTEPS
from ....experience.vision import NEGATIVE, Conditions, joined, samples_of
from ....runtime import collectives
from ....runtime.checkpoint.export import KeptShare
from ....runtime.host_copies import to_device
from ..layers import flow_match_schedule, upcast

logger = logging.getLogger(__name__)
T = torch.Tensor
Grid = tuple[int, int, int]  # frames, rows and columns of an image's tokens
# Refused by a family where its class tells, and by a loaded model where only that does.
NO_NEGATIVE = "this family takes its guidance as an embedding: it reads no negative prompt"
ONE_NETWORK = (
    "min_timestep_boundary and max_timestep_boundary choose between two experts, and this model has one network: leave "
    "them out; mid_timestep and final_timestep choose the steps with gradient"
)
ATTENTION_TARGETS = (
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
)  # fmt: skip

EULER_STEPS = {  # of a UniPCMultistepScheduler: first order and uncorrected, from 1 to 1/1000 before the shift
    "solver_order": 1, "disable_corrector": list(range(TRAIN_TIMESTEPS)), "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}  # fmt: skip


def in_whole_batches(encode: Callable[[Any, list[str]], Conditions]) -> Callable[[Any, list[str]], Conditions]:
    """An `encode_prompts` that always gives the encoders `texts_at_once` texts, the last of them filled up by
    repetition.

    In calls of one shape a text's last bits do not depend on how many others, or which, are encoded beside it.
    """

    @wraps(encode)
    def in_parts(family: DiffusionFamily, prompts: list[str]) -> Conditions:
        size = family.texts_at_once
        filled = [*prompts, *[prompts[-1]] * (-len(prompts) % size)]
        parts = [encode(family, filled[start : start + size]) for start in range(0, len(filled), size)]
        return {name: joined([part[name] for part in parts])[: len(prompts)] for name in parts[0]}

    return in_parts


def _as_tensor(values: Any) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values, dtype=np.float64))


class DiffusionFamily(ABC):
    """Adapter between one pipeline class of diffusers and the policy.

    Subclasses hold no weights: the pipeline does. `prediction` is 'flow' (velocity, noise minus data) or 'epsilon'.
    `lora_targets` are module suffixes of the attention projections. `texts_at_once` may be more than 1 where the
    pipeline pads all texts to one length, and `encode_prompts` is `in_whole_batches`: several then go through the text
    encoders in one call. Padded to the longest, or not at all, each goes by itself.
    """

    pipeline_type: type[DiffusionPipeline] = DiffusionPipeline  # or the class, where diffusers does not have it
    prediction = "flow"
    denoiser_names: tuple[str, ...] = ("transformer",)
    lora_targets: tuple[str, ...] = ATTENTION_TARGETS
    token_area = 4  # positions of the latents, in height and width, that a token of the transformer takes
    evenly_spaced = False  # whether timesteps are even before their shift, whatever the pipeline's scheduler says
    names_sigmas = False  # whether the pipeline always names the sigmas before their shift itself
    left_out = ""  # regular expression of the denoisers' modules and weights that no forward reads: they do not train
    default_text_length: int | None = 256
    takes_text_length = True  # whether another length than the family's own may be asked for
    text_length_at = ""  # attribute of the pipeline that holds it, where no argument of its call does
    texts_at_once = 1
    takes_first_frame = False
    frame_rate: float | None = None  # frames a second, where the model reads it
    plays_at: float | None = None  # frames a second that its videos are shown at, where it reads none
    most_source_images = 0  # of a prompt, where the model edits images
    module_names: dict[str, str] = {}  # of LoRA's modules in the model's own code -> in diffusers
    context_plan: dict[str, Any] | None = None  # where ranks divide tokens; None: as diffusers has it for the denoiser
    divided_attention = ""  # how the names of the attention layers end that exchange the tokens that ranks divide
    takes_graphs = True  # whether `cuda_graphs` serves: forwards of few shapes, that read and make none on the host
    uses_negative = True  # whether classifier-free guidance runs a second, unguided forward

    def __init__(self, pipeline: DiffusionPipeline, text_length: int | None = None) -> None:
        self.pipeline = pipeline
        self.text_length = (text_length if self.takes_text_length else None) or self.default_text_length
        self.detach_guidance = False  # whether the unguided branch carries no gradient
        self.source_pixels: int | None = None  # area that source images are scaled to; None: the pipeline's own
        self.guidance_scale_2: float | None = None  # of the second of two experts; None: as the first
        self.required: frozenset[str] = frozenset()  # networks that run in every forward, needed there or not

    def follow(self, config: DiffusionRunConfig) -> None:
        """Take a run's settings. Raises ConfigError for one that this model does not read."""
        self.detach_guidance = config.algorithm.detach_guidance
        self.source_pixels, self.guidance_scale_2 = config.sampling.source_pixels, config.sampling.guidance_scale_2
        if self.guidance_scale_2 is not None and len(self.denoisers()) == 1:
            raise ConfigError("guidance_scale_2 is that of a second expert; this model has one network: leave it out")
        if config.sampling.frame_rate is not None and self.frame_rate is None:
            raise ConfigError("frame_rate is read by LTX-2, and not by this model: leave it out")
        self.frame_rate = config.sampling.frame_rate or self.frame_rate

    @classmethod
    def check(cls, config: DiffusionRunConfig) -> None:
        """Raise ConfigError for settings of a run that no model of this family follows."""
        model, frames, algorithm = config.model, config.sampling.num_frames, config.algorithm.entry
        config.check_prediction(cls.prediction)
        if model.max_sequence_length not in (None, cls.default_text_length) and not cls.takes_text_length:
            own = "texts of any length" if cls.default_text_length is None else f"{cls.default_text_length} tokens"
            raise ConfigError(f"this model reads {own}: leave max_sequence_length out")
        if config.sampling.source_pixels is not None and not cls.most_source_images:
            raise ConfigError("source_pixels is the size of images to edit, and this model edits none: leave it out")
        if frames > 1 and not cls.draws_videos():
            raise ConfigError(f"num_frames {frames} is of videos, and this model draws images: leave it out")
        if config.sampling.cuda_graphs and not cls.takes_graphs:
            raise ConfigError("cuda_graphs cannot record forwards of this model, or hardly any twice: leave it out")
        if config.offline and cls.most_source_images:
            raise ConfigError("pair_data has no column of images to edit: train this model on prompts")
        for name in model.trained_denoisers or ():
            if name not in cls.denoiser_names:
                told = did_you_mean(name, cls.denoiser_names)
                raise ConfigError(f"trainable_models: this model has no {name!r}{told}")
        if config.sampling.negative_prompt and config.sampling.guidance_scale > 1 and not cls.uses_negative:
            raise ConfigError(NO_NEGATIVE)
        between = (config.algorithm.min_timestep_boundary, config.algorithm.max_timestep_boundary)
        if algorithm.trains_on == "reward" and between != (0.0, 1.0) and len(cls.denoiser_names) == 1:
            raise ConfigError(ONE_NETWORK)

    @classmethod
    def draws_videos(cls) -> bool:
        """Whether its models draw videos: images of one's own cannot be encoded for them."""
        return cls.encode is DiffusionFamily.encode

    def own_modules(self, names: Iterable[str]) -> list[str]:
        """Module suffixes by diffusers' names."""
        return [self.module_names.get(name, name) for name in names]

    def denoisers(self) -> dict[str, nn.Module]:
        """The networks that RL trains, by their name in the pipeline."""
        parts = self.pipeline.components
        return {name: parts[name] for name in self.denoiser_names if parts.get(name) is not None}

    def serving(self, timesteps: T) -> set[str]:
        """Names of the networks that serve these timesteps (n)."""
        names = list(self.denoisers())
        return {names[index] for index in self.expert_index(timesteps).tolist()}

    def expert_index(self, timesteps: T) -> T:
        """(…) long: which of the denoisers serves each of the timesteps (…), in their order; 0 where there is one."""
        return torch.zeros_like(timesteps, dtype=torch.long)

    @classmethod
    def loading(cls) -> dict[str, Any]:
        """Components that take the place of the pipeline's own where it is loaded."""
        return {}

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> Conditions:
        """Conditions (B, …) of B prompts, which may be negative ones."""

    def context_of(self, prompts: list[str], **asked: Any) -> Conditions:
        """context (B, L, D) of pipelines whose texts go through one encoder and are padded to one length."""
        context, *_ = self.pipeline.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=self.text_length, **asked
        )
        return {"context": context}

    @abstractmethod
    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """What the model predicts (B, …), in one forward without classifier-free guidance.

        Args:
            latents: (B, …).
            timesteps: (B) in 0..1000.
            conditions: each (B, …), without those of negative prompts.
            guidance_scale: for models that take it as an embedding.
        """

    @abstractmethod
    def decode(self, latents: T) -> T:
        """Latents (B, …) to media in 0..1: (B, 3, H, W), or (B, 3, T, H, W) for videos. Differentiable; not clamped."""

    def encode(self, images: T) -> T:
        """Images (B, 3, H, W) in 0..1 to latents (B, …), the inverse of `decode`. ConfigError for models of videos."""
        raise ConfigError(f"{type(self.pipeline).__name__} draws videos: images of one's own cannot be encoded for it")

    @abstractmethod
    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """Shape of one sample's latents. Raises ConfigError where the size does not fit.

        Args:
            height, width: in pixels.
            frames: of a video; 1 for an image.
        """

    def velocity(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Prediction (B, …) with classifier-free guidance where the scale is above 1 and negatives are there.

        Args:
            latents, timesteps: as of `predict`.
            conditions: each (B, …); those of negative prompts by their names behind `NEGATIVE`.
            guidance_scale: of the run.
        """
        positive = {key: value for key, value in conditions.items() if not key.startswith(NEGATIVE)}
        if guidance_scale <= 1 or len(positive) == len(conditions):
            return self.predict(latents, timesteps, positive, guidance_scale)
        # Conditions without a negative (a first frame) serve both.
        both = {key: joined([conditions.get(NEGATIVE + key, value), value]) for key, value in positive.items()}
        twice = self.predict(torch.cat([latents] * 2), joined([timesteps] * 2), both, guidance_scale)
        without, with_prompt = twice.chunk(2)
        scale = self.guidance_at(timesteps, guidance_scale)
        return self.combine(without.detach() if self.detach_guidance else without, with_prompt, scale)

    def guidance_at(self, timesteps: T, guidance_scale: float) -> float | T:
        """The scale at these timesteps (B): one for all, or (B, 1, …)."""
        return guidance_scale

    def combine(self, without: T, with_prompt: T, guidance_scale: float | T) -> T:
        """The guided prediction (B, …).

        Args:
            without: of the unguided branch, (B, …).
            with_prompt: of the guided branch, (B, …).
            guidance_scale: of `guidance_at`.
        """
        return without + guidance_scale * (with_prompt - without)

    @classmethod
    def stock_guidance(cls, pipeline: Any, scale: float, negative: str | None) -> dict[str, Any]:
        """Arguments by which the stock pipeline guides as `velocity` does.

        Args:
            pipeline: the stock one; where its parts hold the scale, they are given it.
            scale: of the run.
            negative: the prompt of the unguided branch; None: none.
        """
        return {"guidance_scale": scale, "negative_prompt": negative}

    def encode_first_frames(self, images: list[Any], height: int, width: int, frames: int) -> Conditions:
        """Conditions (B, …) of first frames; image-to-video families only.

        Args:
            images: B first frames (PIL).
            height, width: of the video in pixels, to which they are scaled.
            frames: of the video.
        """
        raise ConfigError(f"{type(self.pipeline).__name__} takes no first frame")

    def encode_edit(self, prompt: str, images: list[Any]) -> Conditions:
        """Conditions (1, …) of a text, which may be a negative one, beside the images (PIL) that it is about."""
        raise ConfigError(f"{type(self.pipeline).__name__} edits no images")

    def encode_sources(self, images: list[Any]) -> Conditions:
        """Conditions (1, …) of one prompt's images (PIL), whatever its text is."""
        raise ConfigError(f"{type(self.pipeline).__name__} edits no images")

    def default_schedule(self, num_steps: int, latent_shape: tuple[int, ...], flow_shift: float | None) -> tuple[T, T]:
        """Timesteps (K) and sigmas (K) of the pipeline's scheduler, as the stock pipeline would run it.

        Args:
            num_steps: K.
            latent_shape: of one sample, by which some schedulers shift.
            flow_shift: takes the place of the scheduler's shift, in the same schedule; None leaves that.
        """
        if self.evenly_spaced:
            return flow_match_schedule(num_steps, flow_shift or self.flow_shift(latent_shape, num_steps))
        scheduler, shifted = self.pipeline.scheduler, {}
        if scheduler.config.get("use_dynamic_shifting"):
            linear = scheduler.config.get("time_shift_type") == "linear"
            given = flow_shift if linear or flow_shift is None else math.log(flow_shift)
            shifted["mu"] = self._dynamic_shift(latent_shape, num_steps) if given is None else given
        elif flow_shift is not None:
            scheduler = self.shifted(scheduler, flow_shift)
        steps = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)} if self.names_sigmas else {}
        name = type(scheduler).__name__
        other = f"the pipeline's scheduler is of other models: {name}"
        with refused_as(ConfigError, other):
            scheduler.set_timesteps(None if steps else num_steps, **steps, **shifted)
        sigmas, timesteps = (_as_tensor(getattr(scheduler, each, ())) for each in ("sigmas", "timesteps"))
        if len(timesteps) != num_steps or len(sigmas) not in (num_steps, num_steps + 1):
            raise ConfigError(f"{other} has not one sigma a step")
        sigmas = sigmas[:num_steps]  # most have the 0 behind the last step
        if not torch.isfinite(sigmas).all():
            raise ConfigError(f"{name} has no schedule of {num_steps} step(s): raise num_steps or eval_num_steps")
        if (first := float(sigmas[0])) > 1.001:
            raise ConfigError(f"{other} begins at sigma {first:.3g} > 1")
        if (sigmas.diff() > 0).any():
            raise ConfigError(f"{other} has sigmas that rise; they must fall from 1, which is noise")
        return timesteps.clone().float(), sigmas.clone().float()

    def flow_shift(self, latent_shape: tuple[int, ...], num_steps: int) -> float:
        """The shift s of sigma -> s sigma / (1 + (s - 1) sigma) that the pipeline's scheduler applies at this size."""
        config = self.pipeline.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return config.get("flow_shift") or config.get("shift") or 1.0
        mu = self._dynamic_shift(latent_shape, num_steps)
        return mu if config.get("time_shift_type") == "linear" else math.exp(mu)

    def starting_scale(self, sigma: float) -> float:
        """What unit noise is multiplied by to be the latents at the first sigma of a schedule."""
        return 1.0

    def _dynamic_shift(self, latent_shape: tuple[int, ...], num_steps: int) -> float:
        """num_steps: most schedulers shift alike for all numbers."""
        config = self.pipeline.scheduler.config
        return calculate_shift(
            self.image_tokens(latent_shape), config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096), config.get("base_shift", 0.5), config.get("max_shift", 1.15),
        )  # fmt: skip

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Sequence length that latents of this shape have in the transformer."""
        return latent_shape[-1] * latent_shape[-2] // self.token_area

    def save_lora(self, folder: Path, layers: dict[str, dict[str, T]], configs: dict[str, Any]) -> None:
        """Write LoRA weights that the stock pipeline's `load_lora_weights` reads.

        Of a stock pipeline without it use `pipeline.transformer.load_lora_adapter(folder,
        weight_name="pytorch_lora_weights.safetensors")`.

        Args:
            folder: which is written to.
            layers: by denoiser, its LoRA weights by name, on the host.
            configs: by denoiser, peft's configuration as a dict.
        """
        pipeline = self.pipeline if hasattr(self.pipeline, "save_lora_weights") else CosmosLoraLoaderMixin
        pipeline.save_lora_weights(
            folder, **{f"{name}_lora_layers": weights for name, weights in layers.items()},
            **{f"{name}_lora_adapter_metadata": config for name, config in configs.items()},
        )  # fmt: skip

    @classmethod
    def evaluated(cls, scheduler: Any, name: str, flow_shift: float | None) -> Any:
        """The stock pipeline's scheduler with which it draws as evaluations do, by Euler's steps at their timesteps;
        None where no setting says these.

        Args:
            scheduler: the stock pipeline's own.
            name: setting `scheduler` of a run.
            flow_shift: setting of a run; None: the scheduler's own.
        """
        own = scheduler.config
        shift = flow_shift or own.get("flow_shift") or own.get("shift") or 1.0
        if name == "flow_match_euler_stock":
            return None if cls.names_sigmas else FlowMatchEulerDiscreteScheduler(shift=shift)
        if not cls.names_sigmas and (name == "flow_match_euler" or cls.evenly_spaced):
            dynamic = flow_shift is None and own.get("use_dynamic_shifting", False)
            return UniPCMultistepScheduler(**EULER_STEPS, flow_shift=shift, use_dynamic_shifting=dynamic)
        scheduler = scheduler if flow_shift is None else cls.shifted(scheduler, flow_shift)
        plain = name == "model_default" or not own.get("shift_terminal")
        return scheduler if plain else type(scheduler).from_config(scheduler.config, shift_terminal=None)

    @classmethod
    def draw_as_evaluated(cls, pipeline: Any, run: Mapping[str, Any]) -> None:
        """Give a stock pipeline the scheduler of `evaluated`; a line says what of a run it cannot be told."""
        name, flow_shift = run.get("scheduler", "model_default"), run.get("flow_shift")
        if run.get("source_pixels") is not None:
            told = f"scales images to edit its own way; the run had source_pixels {run['source_pixels']}"
            logger.warning("%s %s", type(pipeline).__name__, told)
        scheduler = cls.evaluated(pipeline.scheduler, name, flow_shift)
        if scheduler is not None:
            pipeline.scheduler = scheduler
            return
        told = f"scheduler {name}" + ("" if flow_shift is None else f", flow_shift {flow_shift:g}")
        logger.warning("%s draws at its own timesteps; the run's evaluations had %s", type(pipeline).__name__, told)

    @staticmethod
    def shifted(scheduler: Any, flow_shift: float) -> Any:
        """The stock pipeline's scheduler with this shift in the place of its own."""
        known = {"shift": flow_shift, "flow_shift": flow_shift, "use_dynamic_shifting": False}
        own = {name: value for name, value in known.items() if name in scheduler.config}
        return type(scheduler).from_config(scheduler.config, **own)

    @property
    def dtype(self) -> torch.dtype:
        """Of the denoisers' weights, those aside that diffusers keeps in fp32."""
        return self._a_weight.dtype

    @cached_property
    def _a_weight(self) -> nn.Parameter:
        """The weight that diffusers' own `dtype` finds, which goes through all modules at each call."""
        model = next(iter(self.denoisers().values()))
        kept = model._keep_in_fp32_modules or ()
        named = model.named_parameters()
        return next(weight for name, weight in named if not any(part in name for part in kept))

    @property
    def device(self) -> torch.device:
        """Of the denoisers' weights."""
        return next(next(iter(self.denoisers().values())).parameters()).device


class KLImages(DiffusionFamily):
    """Of images by an AutoencoderKL, whose latents are normalised by one scale and one shift."""

    def decode(self, latents: T) -> T:
        """(B, C, h, w) to (B, 3, H, W)."""
        vae = self.pipeline.vae
        return decoded(vae, latents / vae.config.scaling_factor + vae.config.shift_factor)

    def encode(self, images: T) -> T:
        """(B, 3, H, W) to (B, C, h, w): the mean of the autoencoder's answer."""
        vae = self.pipeline.vae
        return (encoded_mean(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor


class PackedLatents(DiffusionFamily):
    """Latents are kept unpacked, (C, h, w); the transformer reads two by two patches of them as tokens."""

    @abstractmethod
    def _tokens(self, tokens: T, grids: list[Grid], timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """What the transformer makes of tokens (B, L, 4 C) of images of these sizes, behind each other."""

    def predict(self, latents: T, timesteps: T, conditions: Conditions, guidance_scale: float) -> T:
        """Velocity, fp32; guidance_scale enters where the model takes it as an embedding."""
        height, width = latents.shape[-2:]
        grids = [(1, height // 2, width // 2)]
        return upcast(unpack(self._tokens(pack(latents), grids, timesteps, conditions, guidance_scale), height, width))

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, height / 8, width / 8)."""
        scale = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels // 4, *spatial_latent(height, width, scale, 2 * scale)


def join_lora(pipeline: Any, folder: Path) -> None:
    """Give a stock pipeline the LoRA weights that a policy saved in `folder`, beside its own. ConfigError where they do
    not fit it."""
    with refused_as(ConfigError, f"the LoRA weights in {folder} cannot be joined with their model"):
        if not hasattr(pipeline, "load_lora_weights"):
            pipeline.transformer.load_lora_adapter(folder, weight_name=LORA)
            return
        for found in lora_folders(folder):
            pipeline.load_lora_weights(found, **({"load_into_transformer_2": True} if found != folder else {}))


def fuse_lora(pipeline: Any) -> KeptShare:
    """Add what `join_lora` gave to the pipeline's own weights, and say how much of it they keep."""
    share = KeptShare()
    for part in pipeline.components.values():
        if not getattr(part, "_hf_peft_config_loaded", False):
            continue
        for layer in part.modules():
            if isinstance(layer, LoraLayer):
                base, (adapter,) = layer.get_base_layer().weight, layer.active_adapters
                base.data = share.sum(base.data, layer.get_delta_weight(adapter))
        part.unload_lora()
    return share


def by_kind(
    kinds: Sequence[Hashable],
    network: nn.Module,
    run: Callable[..., T],
    latents: T,
    timesteps: T,
    conditions: Conditions,
) -> T:
    """Velocity (B, …) of samples that cannot share a forward where their kinds differ.

    Args:
        kinds: (B).
        network: that runs. Where ZeRO-3 divides it all ranks run as many forwards as the one with the most kinds.
        run: from (kind, latents, timesteps, conditions) of the samples of one kind to their velocity.
        latents, timesteps, conditions: as of `DiffusionFamily.predict`.
    """
    different = list(dict.fromkeys(kinds))
    forwards = len(different)
    if is_zero_param(next(network.parameters())):
        forwards = int(collectives.all_reduce_max(torch.tensor(float(forwards))).item())
    if forwards == 1:
        return run(kinds[0], latents, timesteps, conditions)
    velocity = torch.zeros_like(latents)
    for kind in different:
        rows = [row for row, each in enumerate(kinds) if each == kind]
        indices = to_device(torch.tensor(rows), latents.device)
        some = {name: samples_of(value, rows) for name, value in conditions.items()}
        velocity = velocity.index_put((indices,), run(kind, latents[indices], timesteps[indices], some))
    for _ in range(forwards - len(different)):
        first = {name: samples_of(value, [0]) for name, value in conditions.items()}
        velocity = velocity + 0 * run(kinds[0], latents[:1], timesteps[:1], first)
    return velocity


def pack(latents: T) -> T:
    """(B, C, h, w) to tokens (B, h/2 * w/2, 4 C) of two by two patches, as FLUX and Qwen-Image read them."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def unpack(tokens: T, height: int, width: int) -> T:
    """The inverse of `pack`.

    Args:
        tokens: (B, h/2 * w/2, 4 C).
        height, width: h and w of the latents.
    """
    return FluxPipeline._unpack_latents(tokens, height, width, vae_scale_factor=1)


def channel_statistics(vae: nn.Module, like: T) -> tuple[T, T]:
    """Mean and standard deviation (1, C, 1, 1, 1) that the latents of a video autoencoder are normalised by."""
    mean, std = (
        torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def decoded(vae: nn.Module, latents: T, *more: Any) -> T:
    """What the autoencoder makes of latents that have lost the pipeline's scale: media in 0..1, fp32, not clamped.
    more: what its decoder reads beside them."""
    return upcast(vae.decode(latents.to(vae.dtype), *more, return_dict=False)[0]) / 2 + 0.5


def encoded_mean(vae: nn.Module, images: T) -> T:
    """The autoencoder's mean of images in 0..1 (B, 3, …), fp32, as yet without the pipeline's scale."""
    return upcast(vae.encode((images * 2 - 1).to(vae.dtype)).latent_dist.mode())


def spatial_latent(height: int, width: int, scale: int, multiple: int) -> tuple[int, int]:
    """Latent height and width. Raises ConfigError unless both sides are such multiples.

    Args:
        height, width: in pixels.
        scale: pixels of a latent along each side.
        multiple: pixels that the model takes multiples of.
    """
    if height % multiple or width % multiple:
        raise ConfigError(f"height {height} and width {width} must be multiples of {multiple} for this model")
    return height // scale, width // scale


def video_latent(size: tuple[int, int, int], temporal: int, spatial: int, multiple: int) -> tuple[int, int, int]:
    """Latent frames, height and width. Raises ConfigError for another number of frames, and as `spatial_latent` does.

    Args:
        size: (height, width, frames), in pixels.
        temporal: frames of a latent one; a video has `temporal` n + 1.
        spatial: pixels of a latent along each side.
        multiple: as of `spatial_latent`.
    """
    height, width, frames = size
    if (frames - 1) % temporal:
        raise ConfigError(f"num_frames is {frames}; this model takes {temporal} n + 1 frames")
    return (frames - 1) // temporal + 1, *spatial_latent(height, width, spatial, multiple)
