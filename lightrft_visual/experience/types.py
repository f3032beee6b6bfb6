"""Batches of experience between rollout and training, and the fields that they share with single samples.

B samples, S tokens, A actions. Padded form: prompts left-padded, responses right-padded, so that the last A columns
of `sequences` (B, S) are the actions; per-action fields are (B, A). Packed form: one row without padding;
`sequences` (1, total), per-action fields (1, sum of A), `attention_mask` (1, total) holds sample index + 1, and
`packed_seq_lens` and `num_actions` give the splits.

Positional order follows LightRFT. The shared classes exist so that a new tensor is one line in one place: in
`TextExtras` for text and vision-language, in `Provenance` for all three. What a model family's vision tower reads needs
no line here: it travels in `vision` under its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .fields import Kind, replay_field
from .info_layout import InfoLayout
from .vision import VisionName, VisionTensors, adopt_given

T = torch.Tensor
_Batch = TypeVar("_Batch", bound="_Movable")


@dataclass
class BatchLayout:
    """What a batch cannot show by itself: with it, splitting gives back exactly the items the batch was made of.

    spans: first and last + 1 token column of each sample in padded form (None in packed form); prompt_width: columns
    before the actions; absent: samples that lack a field which others have; single: samples that hold one number for
    all their actions; lengths: of tensors by name that are padded to the longest, how long each sample's own is;
    text_only: samples that came as BufferItem into a vision batch; mask_dtype: of the items'
    attention masks.
    """

    spans: list[tuple[int, int]] | None = None
    prompt_width: int = 0
    absent: dict[str, list[int]] = field(default_factory=dict)
    single: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    text_only: list[int] = field(default_factory=list)
    mask_dtype: torch.dtype = torch.long
    info: InfoLayout = field(default_factory=InfoLayout)


@dataclass
class TextFields:
    """Required fields of text experience, in LightRFT's order."""

    sequences: T = replay_field(Kind.TOKENS)
    action_log_probs: T | None = replay_field(Kind.ACTIONS)
    base_action_log_probs: T | None = replay_field(Kind.ACTIONS)
    values: T | None = replay_field(Kind.NUMBERS)
    returns: T | None = replay_field(Kind.NUMBERS)
    advantages: T | None = replay_field(Kind.NUMBERS)
    attention_mask: T | None = replay_field(Kind.TOKENS, fill=1, mask_dtype=torch.long, segments=True)
    action_mask: T | None = replay_field(Kind.ACTIONS, fill=1, mask_dtype=torch.bool)
    info: dict | None = replay_field(Kind.INFO)


@dataclass
class VisionFields:
    """Fields of vision-language experience, in LightRFT's order; all but the sequences optional."""

    sequences: T = replay_field(Kind.TOKENS)
    pixel_values: T | None = VisionName("pixel_values")  # type: ignore[assignment]
    image_grid_thws: T | None = VisionName("image_grid_thw")  # type: ignore[assignment]
    pixel_values_videos: T | None = VisionName("pixel_values_videos")  # type: ignore[assignment]
    video_grid_thws: T | None = VisionName("video_grid_thw")  # type: ignore[assignment]
    raw_images: list | None = replay_field(Kind.OBJECTS, default=None)
    action_log_probs: T | None = replay_field(Kind.ACTIONS, default=None)
    base_action_log_probs: T | None = replay_field(Kind.ACTIONS, default=None)
    values: T | None = replay_field(Kind.NUMBERS, default=None)
    returns: T | None = replay_field(Kind.NUMBERS, default=None)
    advantages: T | None = replay_field(Kind.NUMBERS, default=None)
    attention_mask: T | None = replay_field(Kind.TOKENS, default=None, fill=1, mask_dtype=torch.long, segments=True)
    action_mask: T | None = replay_field(Kind.ACTIONS, default=None, fill=1, mask_dtype=torch.bool)
    info: dict | None = replay_field(Kind.INFO, default=None)


@dataclass
class DiffusionFields:
    """One denoising trajectory of K steps: latents (K+1, C, ...), timesteps (K), log_probs (K), embeddings by name."""

    latents: T = replay_field(Kind.SAMPLE)
    timesteps: T | None = replay_field(Kind.SAMPLE)
    log_probs: T | None = replay_field(Kind.SAMPLE)
    prompt_embeds: dict[str, T] | None = replay_field(Kind.SAMPLES)
    advantages: T | None = replay_field(Kind.SAMPLE)
    info: dict | None = replay_field(Kind.INFO, default=None)
    sigmas: T | None = replay_field(Kind.SAMPLE, default=None)  # (K+1)
    reference_means: T | None = replay_field(Kind.SAMPLE, default=None)  # (K, C, ...)
    shared_embeds: dict[str, T] | None = replay_field(Kind.OBJECTS, default=None)  # (1, ...) by name, once a prompt


@dataclass
class KlField:
    """KL to the reference policy of each action; apart, because items and batches have it at different places."""

    kl: T | None = replay_field(Kind.ACTIONS, default=None)


@dataclass
class TextExtras:
    """Per-action extras: entropy of the policy, log-probs of the engine at the sampling temperature, of a teacher;
    versions of the policy that drew each token, where they may differ."""

    action_entropy: T | None = replay_field(Kind.ACTIONS, default=None)
    rollout_log_probs: T | None = replay_field(Kind.ACTIONS, default=None)
    teacher_log_probs: T | None = replay_field(Kind.ACTIONS, default=None)
    token_versions: T | None = replay_field(Kind.ACTIONS, default=None, fill=-1)


@dataclass
class Provenance:
    """Where a sample comes from. group_id: its prompt; sample_id: index in the global batch; policy_version: of the
    policy that sampled it; valid: false when its reward failed, so that statistics and loss leave it out."""

    group_id: T | None = replay_field(Kind.SAMPLE, default=None, fill=-1)
    sample_id: T | None = replay_field(Kind.SAMPLE, default=None, fill=-1)
    policy_version: T | None = replay_field(Kind.SAMPLE, default=None, fill=-1)
    valid: T | None = replay_field(Kind.SAMPLE, default=None, fill=1)


@dataclass
class VisionExtras:
    """How many images and videos belong to each sample, and every tensor of theirs that the model's forward takes.

    The contract's names read and write the tensors of `vision`; a family's other tensors are in it under their own
    names. video_seconds_per_grid: seconds between temporal patches of each video, by which Qwen2.5-VL places frames in
    time; 1 where nobody says, as in transformers.
    """

    image_counts: T | None = replay_field(Kind.COUNTS, default=None, media="image")
    video_counts: T | None = replay_field(Kind.COUNTS, default=None, media="video")
    video_seconds_per_grid: T | None = VisionName("second_per_grid_ts")  # type: ignore[assignment]
    vision: VisionTensors = replay_field(Kind.VISION, default=None)

    def __post_init__(self) -> None:
        adopt_given(self)


def map_tensors(value: Any, function: Callable[[T], T]) -> Any:
    """`value` with `function` applied to every tensor inside nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, VisionTensors):
        return value.map(function)
    if isinstance(value, dict):
        return {key: map_tensors(each, function) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(each, function) for each in value)
    return value


@dataclass
class _Movable:
    """Moves of all tensors of a batch: everything that it holds, so that none can be forgotten."""

    def _apply(self: _Batch, function: Callable[[T], T]) -> _Batch:
        for name, value in vars(self).items():
            if name != "layout":
                setattr(self, name, map_tensors(value, function))
        return self

    @torch.no_grad()
    def to_device(self: _Batch, device: torch.device | str) -> _Batch:
        """Move every tensor, `info` included, to `device` in place; returns self."""
        return self._apply(lambda tensor: tensor.to(device))

    def pin_memory(self: _Batch) -> _Batch:
        """Pin every tensor for faster copies to the accelerator; does nothing where there is none. Returns self."""
        from deepspeed.accelerator import get_accelerator

        return self._apply(get_accelerator().pin_memory)


@dataclass
class _Packable(_Movable):
    packed_seq_lens: list[int] | None = None
    num_actions: list[int] | None = None
    layout: BatchLayout | None = field(default=None, compare=False, repr=False)

    @property
    def is_packed(self) -> bool:
        return self.packed_seq_lens is not None

    @property
    def batch_size(self) -> int:
        return len(self.packed_seq_lens) if self.packed_seq_lens is not None else len(self.sequences)


# Dataclass fields come in reverse order of the bases: the last base first.
@dataclass
class Experience(_Packable, Provenance, TextExtras, KlField, TextFields):
    """A batch of text samples, padded or packed. `values`, `returns` and `advantages` hold one number per action."""


@dataclass
class ExperienceVL(_Packable, VisionExtras, Provenance, TextExtras, KlField, VisionFields):
    """A batch of samples with or without images and videos.

    `vision` refers to each sample's tensors. Read by name they come joined in sample order: pixel_values (sum of
    patches, patch_dim), image_grid_thws (sum of images, 3), video_seconds_per_grid (sum of videos). image_counts (B): a
    sample without images has count 0. raw_images: a list of B lists.
    """


@dataclass
class ExperienceDiffusion(_Movable, Provenance, DiffusionFields):
    """A batch of denoising trajectories of one shape: latents (B, K+1, C, ...), timesteps and log_probs (B, K),
    prompt_embeds {name: (B, ...)}, sigmas (B, K+1), advantages (B) or (B, K). shared_embeds: of models that edit
    images, what prompt and source images are to the model, for each sample; those of a prompt refer to one copy."""

    layout: BatchLayout | None = field(default=None, compare=False, repr=False)

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        return len(self.latents)
