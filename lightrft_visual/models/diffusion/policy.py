"""The diffusion policy: one module over any family that rolls out, replays, decodes, and saves LoRA.

Only the denoisers are registered as modules, so the strategy shards and saves what is trained; VAE and text encoders
stay in the pipeline, frozen. The reference policy is the same network with its LoRA switched off, or, when all weights
train, a frozen copy that is swapped in.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.utils import get_peft_model_state_dict
from PIL import Image, ImageOps
from torch import nn

from ...config.diffusion import PARTS, DiffusionModelConfig
from ...config.shared import FULL
from ...data.media import pixel_hash
from ...errors import ConfigError, did_you_mean, refused_as
from ...experience.vision import NEGATIVE, Conditions, separate, stacked
from ...runtime import collectives
from ...runtime.host_copies import HostCopies
from ...runtime.hub import fetch_model
from ...runtime.offload import on_device
from ...runtime.vendor_patches import program_limit
from ...runtime.zero3_loading import Divide
from ..checkpointed import checkpointing_func
from ..weight_copies import WeightCopy, gathered, lora_config, standing_in, whole_on_host
from ..weight_files import LOADING
from .families.base import NO_NEGATIVE, DiffusionFamily
from .layers import load_divided, load_pipeline, use_frozen_norms
from .opening import named_family, pipeline_class, save_text_length, saved_text_length
from .prompt_cache import PIXELS_A_LATENT, PromptCache, checkpoint_decoder, in_parts
from .wan_parts import load_wan_parts

logger = logging.getLogger(__name__)
T = torch.Tensor
ADAPTER = "default"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "connectors")
PROGRAMS_A_BLOCK = 64  # kinds of blocks, with and without gradients, LoRA on and off; torch.compile gives up after 8


@dataclass(frozen=True)
class LoraSettings:
    """rank 0 trains all weights. target_modules: module suffixes; None takes the family's attention projections.

    There is no dropout: replay must give the rollout's log-probs again."""

    rank: int = 0
    alpha: int = 64
    target_modules: tuple[str, ...] | None = None

    @classmethod
    def from_config(cls, model: DiffusionModelConfig) -> LoraSettings:
        """Those of a run."""
        given = model.target_modules
        targets = None if given is None else tuple(name.strip() for name in given.split(","))
        return cls(model.lora_rank, model.lora_alpha, targets)


class DiffusionPolicy(nn.Module):
    """See the module's docstring. trainable: names of the denoisers that train; None trains all of them."""

    def __init__(
        self, family: DiffusionFamily, lora: LoraSettings | None = None, trainable: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.family = family
        self.lora = lora or LoraSettings()
        self.denoisers = nn.ModuleDict(family.denoisers())
        if not self.denoisers:
            told = f"{', '.join(family.denoiser_names)}; it has {', '.join(family.pipeline.components)}"
            raise ConfigError(f"{type(family).__name__}: the pipeline has none of its denoiser_names {told}")
        self.trainable = tuple(self.denoisers) if trainable is None else trainable
        unknown = set(self.trainable) - set(self.denoisers)
        if unknown:
            raise ConfigError(
                f"trainable_models names {', '.join(sorted(unknown))}; this model has: {', '.join(self.denoisers)}"
            )
        self._reference: WeightCopy | None = None
        self._encoded = PromptCache()
        self.offload_activations = self._cut_told = False
        self._freeze_and_adapt()

    @classmethod
    def from_pretrained(
        cls, path: str, *, lora: LoraSettings | None = None, dtype: torch.dtype = torch.float32,
        trainable: tuple[str, ...] | None = None, text_length: int | None = None, family: str = "auto",
        divide: Divide | None = None, tokenizer: str | None = None,
    ) -> DiffusionPolicy:  # fmt: skip
        """The policy of a pipeline.

        Args:
            path: a diffusers pipeline folder, a hub id, or a JSON file that names its parts (wan_parts.py).
            lora: None: all weights train.
            dtype: of the weights.
            trainable: names of the denoisers that train; None trains all of them.
            text_length: T5 or LLM tokens; default: what the folder says (`saved_text_length`), else the family's own.
            family: its registered name; auto finds the one that reads the pipeline's class.
            divide: the strategy's, under ZeRO-3: the denoisers of a folder or hub id are then divided over the ranks
                while they load, and all ranks load together.
            tokenizer: folder or hub id of that of a model in parts; None: the one of `load_wan_parts`.

        Raises:
            ConfigError: no family here reads the pipeline's class, or it is not the one named.
        """
        fetch_model(path)
        if divide is not None:
            collectives.meet()  # from here on ranks load together
        with refused_as(ConfigError, f"model {path} cannot be loaded"), LOADING:
            adapter = named_family(pipeline_class(path), family)
            if path.endswith(PARTS):
                return cls(adapter(load_wan_parts(path, dtype, tokenizer), text_length), lora, trainable)
            parts = adapter.loading()
            if divide is not None:
                trained = () if lora is not None and lora.rank else trainable or adapter.denoiser_names
                parts |= load_divided(path, adapter.denoiser_names, dtype, divide, cast=trained)
            with torch.random.fork_rng([]):  # what loading draws differs by ZeRO stage, and adapters start alike
                pipeline = load_pipeline(path, dtype, parts, adapter.pipeline_type)
            return cls(adapter(pipeline, text_length or saved_text_length(path)), lora, trainable)

    @property
    def device(self) -> torch.device:
        """Of the denoisers' weights."""
        return self.family.device

    def forward(self, latents: T, timesteps: T, conditions: dict[str, T], guidance_scale: float = 1.0) -> T:
        """Velocity (B, …), fp32; the engine's hooks run here. Args: as of `DiffusionFamily.velocity`."""
        with self._kept_activations():
            made = self.family.velocity(latents, timesteps, conditions, guidance_scale)
        shape = tuple(latents.shape)
        if tuple(getattr(made, "shape", ())) != shape:  # it would be broadcast
            raise self._wrong("predict", made, f"the latents' {shape}")
        return made

    def _wrong(self, method: str, made: Any, wanted: str) -> ConfigError:
        """The error of a family's method that gives something else."""
        shape = tuple(getattr(made, "shape", ()))
        found = type(made).__name__ + (f" of shape {shape}, {made.dtype}" if shape else "")
        return ConfigError(f"{type(self.family).__name__}.{method} gave a {found}; it must give {wanted}")

    def velocity(self, latents: T, timesteps: T, conditions: dict[str, T], guidance_scale: float = 1.0) -> T:
        """The same as `forward`. Args: as of `DiffusionFamily.velocity`."""
        return self(latents, timesteps, conditions, guidance_scale)

    def move_to(self, device: torch.device) -> None:
        """Put the denoisers on the device. Text encoders and VAE, which may be larger, come there for their turns."""
        self.denoisers.to(device)

    @torch.no_grad()
    def remember_prompts(self, texts: list[str]) -> dict[str, dict[str, T]]:
        """Conditions (1, …) of each text, on the host. The text encoders are on the device while one is new.

        Each text is encoded once, several new ones in one call. What it gives does not depend on its neighbours, and so
        not on rank count or on where a run was resumed: see `families.base.in_whole_batches`.
        """
        known = {text: self._encoded.find(text) for text in dict.fromkeys(texts)}
        new = [text for text, conditions in known.items() if conditions is None]
        self._say_cut(new)
        size, copies, made = self.family.texts_at_once, HostCopies(), []
        with self._at_work(*TEXT_ENCODERS) if new else nullcontext():
            for start in range(0, len(new), size):
                encoded = separate(self._encode(new[start : start + size]))
                made += [{name: copies.of(value) for name, value in each.items()} for each in encoded]
            copies.wait()  # once for all texts
        for text, each in zip(new, made, strict=True):
            own = {name: value.clone() for name, value in each.items()}  # neither page-locked nor a part of a batch
            known[text] = self._encoded.get(text, lambda own=own: own)
        return known

    def _encode(self, texts: list[str]) -> Conditions:
        made = self.family.encode_prompts(texts)
        values = list(made.values()) if isinstance(made, Mapping) else []
        if not values or not all(isinstance(each, T) and each.shape[:1] == (len(texts),) for each in values):
            raise self._wrong("encode_prompts", made, f"a dict of tensors ({len(texts)}, …) of the texts")
        return made

    def _say_cut(self, texts: list[str]) -> None:
        """Once, that a text is longer than what the encoder reads: most pipelines say nothing. Those of several
        encoders, of other lengths, do."""
        tokenizers = [name for name in self.family.pipeline.components if name.startswith("tokenizer")]
        if self._cut_told or not texts or self.family.text_length is None or tokenizers != ["tokenizer"]:
            return
        tokenizer = self.family.pipeline.tokenizer
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # FLUX.2 [dev]'s is a processor
        longest = max(map(len, tokenizer(texts, verbose=False).input_ids))
        if longest > self.family.text_length:
            self._cut_told, told = True, "a prompt has %d tokens, of which the model reads %d (max_sequence_length)"
            logger.warning(told, longest, self.family.text_length)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Let torch.compile make one program of each kind of repeated block; the first forwards wait for it.

        Batch sizes are left open, so that rollouts, replay and evaluation share programs. A rollout and its replay run
        other programs (without and with gradients), so their log-probs agree to rounding, no longer bit for bit.
        backend: of torch.compile.
        """
        limit = program_limit(PROGRAMS_A_BLOCK)
        for denoiser in self.denoisers.values():
            for block in repeated_blocks(denoiser):
                block.compile(backend=backend, dynamic=True, **limit)

    def encode_prompts(self, prompts: list[str], negative: str | None = None) -> dict[str, T]:
        """Conditions, each (B, …), on the device; see `conditions_of`."""
        return stacked(self.conditions_of(prompts, negative), self.device)

    def conditions_of(self, prompts: list[str], negative: str | None = None) -> list[Conditions]:
        """Conditions (1, …) of B texts on the host, one dict for texts that are alike. negative: for guidance."""
        guided = self._guided_by(negative)
        known = self.remember_prompts([*prompts, negative] if guided else prompts)
        without = {NEGATIVE + name: value for name, value in known[negative].items()} if guided else {}
        made = {text: each | without for text, each in known.items()}
        return [made[text] for text in prompts]

    def _guided_by(self, negative: str | None) -> bool:
        if negative and not self.family.uses_negative:
            raise ConfigError(NO_NEGATIVE)
        return negative is not None and self.family.uses_negative

    @torch.no_grad()
    def encode_first_frames(self, images: list[Any], height: int, width: int, frames: int) -> list[Conditions]:
        """Conditions (1, …) of B first frames, to be merged with those of the prompts; image-to-video only.

        Each image is encoded once and by itself, and remembered as prompts are: its samples and later steps have it.

        Args: as of `DiffusionFamily.encode_first_frames`.
        """
        different = {(pixel_hash(image), height, width, frames): image for image in images}
        known = all(key in self._encoded for key in different)
        with nullcontext() if known else self._at_work("vae", "image_encoder"):
            encoded = {
                key: self._encoded.get(key, partial(self.family.encode_first_frames, [image], height, width, frames))
                for key, image in different.items()
            }
        return [encoded[pixel_hash(image), height, width, frames] for image in images]

    @torch.no_grad()
    def encode_edits(
        self, prompts: list[str], images: list[list[Image.Image]], negative: str | None = None
    ) -> list[Conditions]:
        """Conditions (1, …) on the host of each text with its source images; models that edit only.

        Samples of one prompt with the same images get one dict. Each pair is encoded once and by itself, as texts are.

        Args:
            prompts: B texts.
            images: the source images of each.
            negative: the prompt of the unguided branch; None leaves it out.
        """
        negative = negative if self._guided_by(negative) else None
        digests = {id(image): pixel_hash(image) for sources in images for image in sources}
        keys = [tuple(digests[id(image)] for image in sources) for sources in images]
        edits = dict(zip(zip(prompts, keys, strict=True), images))
        texts = [(text, key) for prompt, key in edits for text in (prompt, negative) if text is not None]
        with nullcontext() if all(each in self._encoded for each in texts) else self._at_work(*TEXT_ENCODERS, "vae"):
            made = {(prompt, key): self._edit(prompt, key, edits[prompt, key], negative) for prompt, key in edits}
        return [made[pair] for pair in zip(prompts, keys)]

    def _edit(self, prompt: str, key: tuple[str, ...], images: list[Image.Image], negative: str | None) -> Conditions:
        def read(text: str) -> Conditions:
            return self._encoded.get((text, key), partial(self.family.encode_edit, text, images))

        found = read(prompt) | self._encoded.get(key, partial(self.family.encode_sources, images))
        if negative is not None:
            found |= {NEGATIVE + name: value for name, value in read(negative).items()}
        return found

    @torch.no_grad()
    def encode_images(self, images: list[Image.Image], height: int, width: int) -> T:
        """Latents (B, …), fp32.

        Args:
            images: B, each scaled and cut about its middle to the size.
            height, width: in pixels.
        """
        fitted = [ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS) for image in images]
        pixels = [torch.from_numpy(np.asarray(each, dtype=np.float32) / 255).permute(2, 0, 1) for each in fitted]
        with self._at_work("vae"):
            return in_parts(self.family.encode, torch.stack(pixels).to(self.device), larger=PIXELS_A_LATENT)

    def decode(self, latents: T) -> T:
        """Media in about 0..1 (not clamped): (B, 3, H, W) or (B, 3, T, H, W). Differentiable in the latents."""
        if torch.is_grad_enabled() and latents.requires_grad:
            self.family.pipeline.vae.to(self.device)  # backward needs it too: it leaves after the next plain decoding
            with self._kept_activations():
                return in_parts(self._decode, latents)
        (media,) = self.decode_each([latents])
        return media

    @torch.no_grad()
    def decode_each(self, latents: Iterable[T]) -> Iterator[T]:
        """`decode` of one after the other, in one stay of the VAE on the device."""
        with self._at_work("vae"):
            for each in latents:
                yield in_parts(self._decode, each)

    def _decode(self, latents: T) -> T:
        media, size = self.family.decode(latents), len(latents)
        fits = isinstance(media, T) and media.is_floating_point() and media.dim() in (4, 5)
        if not fits or tuple(media.shape[:2]) not in ((size, 3), (size, 1)):
            raise self._wrong("decode", media, f"floating ({size}, 3, H, W), or ({size}, 3, T, H, W) of videos")
        return media

    @contextmanager
    def _at_work(self, *names: str) -> Iterator[None]:
        """These parts of the pipeline, where it has them, are on the device inside, and on the host afterwards."""
        parts = [self.family.pipeline.components.get(name) for name in names]
        with ExitStack() as stack:
            for part in filter(None, parts):
                stack.enter_context(on_device(part, self.device, offload=True))
            yield

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Latent shape of one sample for a size in pixels. Args: as of `DiffusionFamily.latent_shape`."""
        shape = self.family.latent_shape(height, width, frames)
        if not isinstance(shape, tuple | list) or not all(isinstance(size, Integral) for size in shape):
            told = f"{type(self.family).__name__}.latent_shape gave {shape!r}"
            raise ConfigError(f"{told}; it must give a tuple of whole numbers")
        return tuple(shape)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer changes: adapters, or all weights of the trained denoisers."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def train_only(self, names: set[str]) -> None:
        """Freeze the trained denoisers that are not named; weight decay would move them even without a gradient.

        Raises ConfigError when nothing is left to train.
        """
        kept = tuple(name for name in self.trainable if name in names)
        if not kept:
            raise ConfigError(
                f"the steps with gradient are served by {', '.join(sorted(names))}, which trainable_models leaves out"
            )
        for name in set(self.trainable) - set(kept):
            self.denoisers[name].requires_grad_(False)
        self.trainable = kept

    @contextmanager
    def running(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these networks run in each forward, with a gradient of zero where no sample needs them.

        Those that another rank needs compute together, under ZeRO-3 and where gradients are reduced; no forward asks.
        """
        self.family.required = frozenset(names)
        try:
            yield
        finally:
            self.family.required = frozenset()

    def trains_at(self, timestep: T) -> bool:
        """Whether the network that serves this timestep () is under training."""
        return not self.family.serving(timestep.reshape(1)).isdisjoint(self.trainable)

    def keep_reference(self) -> None:
        """Remember the present weights as the reference; needed only when all weights train."""
        if self.lora.rank == 0:
            self._reference = WeightCopy(self.trainable_parameters())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the policy computes as the reference does: LoRA off, or the kept copy swapped in."""
        if self.lora.rank == 0:
            if self._reference is None:
                raise RuntimeError("all weights train: call keep_reference() before the first update")
            with self._reference.swapped():
                yield
            return
        for name in self.trainable:
            self.denoisers[name].disable_adapters()
        try:
            yield
        finally:
            for name in self.trainable:
                self.denoisers[name].enable_adapters()

    def enable_gradient_checkpointing(self, offload: bool = False, how: str = FULL) -> None:
        """Recompute blocks of the trained networks and of the VAE's decoder in backward; offload keeps what is saved
        between them in host memory. how: as the setting; it says what of the networks' blocks is kept."""
        self.offload_activations = offload
        checkpoint_decoder(self.family.pipeline.vae)
        for name in self.trainable:
            self.denoisers[name].enable_gradient_checkpointing(checkpointing_func(how, name))

    def _kept_activations(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu() if self.offload_activations else nullcontext()

    def save_lora(self, folder: str | Path) -> None:
        """Write `pytorch_lora_weights.safetensors` for the stock pipeline's `load_lora_weights`.

        Every rank calls it, rank 0 writes.
        """
        if self.lora.rank == 0:
            raise ConfigError("this policy trains all weights; save the pipeline instead of LoRA")
        layers, configs = {}, {}
        for name in self.trainable:
            denoiser = self.denoisers[name]
            with gathered([parameter for parameter in denoiser.parameters() if parameter.requires_grad]):
                weights = get_peft_model_state_dict(denoiser, adapter_name=ADAPTER)
                layers[name] = {key: value.detach().cpu().clone() for key, value in weights.items()}
            configs[name] = denoiser.peft_config[ADAPTER].to_dict()
        if collectives.is_rank_0():
            self.family.save_lora(Path(folder), layers, configs)

    def weights_on_host(self) -> Any:
        """What `save_pretrained` writes, on rank 0's host. Every rank calls it."""
        return whole_on_host(self.parameters(), keep=collectives.is_rank_0())  # ZeRO-3 shards frozen denoisers too

    def save_pretrained(self, folder: str | Path, sampling: Any = None, weights: Any = None) -> None:
        """Write the whole pipeline; with LoRA, the LoRA file beside the untouched base is `save_lora`.

        Every rank calls it, rank 0 writes.

        Args:
            folder: which is written to.
            sampling: settings of a run, whose evaluations the saved pipeline draws as; None: its own scheduler stays.
            weights: of `weights_on_host`; default: those of now.
        """
        if self.lora.rank:
            raise ConfigError("a LoRA policy is saved by save_lora; its base model did not change")
        with standing_in(self.weights_on_host() if weights is None else weights):
            if collectives.is_rank_0():
                pipeline, own = self.family.pipeline, self.family.pipeline.scheduler
                if sampling is not None:
                    self.family.draw_as_evaluated(pipeline, vars(sampling))
                pipeline.save_pretrained(folder)
                pipeline.scheduler = own
        if collectives.is_rank_0() and self.family.text_length is not None:
            save_text_length(folder, self.family.text_length)

    def _freeze_and_adapt(self) -> None:
        for part in self.family.pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        use_frozen_norms(self.denoisers)
        for name in self.trainable:
            if self.lora.rank == 0:
                for weight, values in self.denoisers[name].named_parameters():
                    values.requires_grad_(re.fullmatch(self.family.left_out, weight) is None)
                continue
            targets = self._lora_targets(self.denoisers[name])
            config = lora_config(
                self.lora.rank, self.lora.alpha, init_lora_weights="gaussian", target_modules=targets,
                exclude_modules=self.family.left_out if self.lora.target_modules else None,
            )  # fmt: skip
            with refused_as(ConfigError, f"LoRA cannot be added (target_modules {','.join(targets)})"):
                self.denoisers[name].add_adapter(config, adapter_name=ADAPTER)

    def _lora_targets(self, denoiser: nn.Module) -> list[str]:
        """Raises ConfigError for one that a run names and the network has not: peft passes over it beside others."""
        given = self.lora.target_modules
        if given is None:
            return self.family.own_modules(self.family.lora_targets)
        for name, own in zip(given, self.family.own_modules(given)):
            if not any(f".{module}".endswith(f".{own}") for module, _ in denoiser.named_modules()):
                linear = [module for module, each in denoiser.named_modules() if isinstance(each, nn.Linear)]
                told = did_you_mean(name, (module.rpartition(".")[2] for module in linear))
                told += "; without target_modules it is the attention projections"
                raise ConfigError(f"target_modules: {type(denoiser).__name__} has no module {name!r}{told}")
        return self.family.own_modules(given)


def repeated_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """Those that diffusers names as repeated, else the members of the network's lists of layers."""
    names = getattr(denoiser, "_repeated_blocks", None)
    if names:
        return [module for module in denoiser.modules() if type(module).__name__ in names]
    return [block for child in denoiser.children() if isinstance(child, nn.ModuleList) for block in child]
