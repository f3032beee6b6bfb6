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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress
from typing import Any, TypeVar

import torch

from ..runtime import collectives
from ..runtime.host_copies import on_host, to_device
from .fields import InfoLayout, Kind, replay_field, unpack_actions
from .vision import PATCHES, VisionName, VisionTensors, adopt_given

T = torch.Tensor

_Batch = TypeVar("_Batch", bound="_Movable")


@dataclass
class BatchLayout:
    """What a batch cannot show by itself: with it, splitting gives back exactly the items the batch was made of.

    spans: first and last + 1 token column of each sample in padded form (None in packed form); prompt_width: columns
    before the actions; absent: samples that lack a field which others have; single: samples that hold one number for
    all their actions; lengths: of tensors by name that are padded to the longest, how long each sample's own is;
    text_only: samples that came as BufferItem into a vision batch; mask_dtype: of the items' attention masks.
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

    __post_init__ = adopt_given


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

    def apply(self: _Batch, function: Callable[[T], T]) -> _Batch:
        for name, value in vars(self).items():
            if name != "layout":
                setattr(self, name, map_tensors(value, function))
        return self

    @torch.no_grad()
    def to_device(self: _Batch, device: torch.device | str) -> _Batch:
        """Move every tensor, `info` included, to `device` in place; returns self."""
        return self.apply(cache(partial(to_device, device=device)))  # what samples share moves once

    def pin_memory(self: _Batch) -> _Batch:
        """Pin every tensor for faster copies to the accelerator; does nothing where there is none. Returns self."""
        from deepspeed.accelerator import get_accelerator

        return self.apply(get_accelerator().pin_memory)


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
    prompt_embeds {name: (B, ...)}, sigmas (B, K+1), advantages (B) or (B, K). shared_embeds: what the prompt,
    and images to edit, are to the model, for each sample; those of a prompt refer to one copy."""

    layout: BatchLayout | None = field(default=None, compare=False, repr=False)

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        return len(self.latents)


@dataclass
class Samples:
    """One micro-batch of rollouts.

    sequences (B, S) long; attention_mask (B, S) long, 1 on real tokens; action_mask (B, A) bool, true on sampled
    tokens; rollout_log_probs (B, A) float32, the engine's log-probs at the sampling temperature, 0 where masked.
    group_ids (B) long: samples of one prompt share one id; sample_ids (B) long: index in the global batch.
    truncated (B) bool: the response hit the length limit. Text fields are lists of length B.
    The reward engine fills rewards (B) float32, reward_valid (B) bool and reward_metrics {name: (B)}.
    """

    sequences: T
    attention_mask: T
    action_mask: T
    group_ids: T
    sample_ids: T
    truncated: T
    prompts: list[str]  # after the chat template
    responses: list[str]  # decoded, without special tokens when skip_special_tokens
    labels: list[str | None]
    references: list[Any]
    metadata: list[dict[str, Any]]  # the other columns of the data row
    rollout_log_probs: T | None = None
    policy_version: int = 0
    token_versions: T | None = None  # (B, A) of the policy that drew each token, -1 beside them; None where all are one
    rewards: T | None = None
    reward_valid: T | None = None
    reward_metrics: dict[str, T] = field(default_factory=dict)

    @property
    def num_actions(self) -> int:
        """A, the length of the longest response in tokens."""
        return self.action_mask.shape[1]

    @property
    def response_length(self) -> T:
        """(B) long: sampled tokens of each response."""
        return self.action_mask.sum(dim=1)

    @property
    def total_length(self) -> T:
        """(B) long: real tokens of each sequence."""
        return self.attention_mask.sum(dim=1)

    @property
    def queries(self) -> list[str]:
        """Prompt and response of each sample in one string."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses)]

    def __len__(self) -> int:
        return self.sequences.shape[0]


@dataclass
class SamplesVL(Samples):
    """Samples with vision inputs.

    vision: each sample's tensors, shared, not copied, in a group; `pixel_values` and the other names of the replay
    contract read them joined in sample order. image_counts, video_counts (B) long. raw_images, raw_videos: for each
    sample its PIL images and its videos, an empty list without any, shared likewise. drawn_images: what each sample
    drew, None where it did not; captions: what it was to draw, None where the answer is text.
    """

    vision: VisionTensors = field(default_factory=VisionTensors)
    image_counts: T | None = None
    video_counts: T | None = None
    raw_images: list[list] | None = None
    raw_videos: list[list] | None = None
    drawn_images: list[Any] | None = None
    captions: list[str | None] | None = None

    pixel_values = VisionName("pixel_values")
    image_grid_thws = VisionName("image_grid_thw")
    pixel_values_videos = VisionName("pixel_values_videos")
    video_grid_thws = VisionName("video_grid_thw")


def pad_rollouts(
    prompt_ids: list[list[int]], response_ids: list[list[int]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts left-padded, responses right-padded, so that the last A columns are the actions.

    Args:
        prompt_ids: token ids of B prompts.
        response_ids: token ids of their responses; where all are empty A is still 1.
        pad_id: token id of padding.

    Returns:
        sequences (B, S) long, attention_mask (B, S) long, action_mask (B, A) bool.
    """
    width = max(len(ids) for ids in prompt_ids)
    actions = max(1, *(len(ids) for ids in response_ids))
    sequences = torch.full((len(prompt_ids), width + actions), pad_id, dtype=torch.long)
    attention_mask = torch.zeros_like(sequences)
    action_mask = torch.zeros(len(prompt_ids), actions, dtype=torch.bool)
    for index, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        span = slice(width - len(prompt), width + len(response))
        sequences[index, span] = torch.tensor(prompt + response)
        attention_mask[index, span] = 1
        action_mask[index, : len(response)] = True
    return sequences, attention_mask, action_mask


@dataclass
class ModelInputs:
    """Padded: sequences and attention_mask (B, S), the last A columns are actions. Packed: (1, total) rows, with
    `packed_seq_lens` (tokens of each sample). action_mask (B, A) bool, right-padded, in both forms.
    num_actions: in packed form, action columns of each sample. vision: what the model reads of images and videos,
    joined only by the forward. sample_ids (B): who to name in errors. group_ids (B): whose prompt is the same.
    routing: of each sample the recorded experts of its first tokens (n, layers, k), None where it has no record.
    media: the pixels (`VisionTensors.media`) that any rank's forward at this place has; None: each knows its own alone.
    """

    sequences: T
    attention_mask: T
    action_mask: T
    packed_seq_lens: list[int] | None = None
    num_actions: list[int] | None = None
    vision: VisionTensors = field(default_factory=VisionTensors)
    sample_ids: T | None = None
    group_ids: T | None = None
    routing: list[T | None] | None = None
    media: frozenset[str] | None = None

    @classmethod
    def of(cls, batch: Experience | ExperienceVL, media: frozenset[str] | None = None) -> ModelInputs:
        """Inputs of a micro-batch; no copies."""
        more: dict[str, Any] = {"sample_ids": batch.sample_id, "group_ids": batch.group_id, "media": media}
        if (batch.info or {}).get("experts") is not None:
            more["routing"] = list(batch.info["experts"])
        if isinstance(batch, ExperienceVL):
            more["vision"] = batch.vision
        if not batch.is_packed:
            return cls(batch.sequences, batch.attention_mask, batch.action_mask, **more)
        mask = to_device(unpack_actions(on_host(batch.action_mask), batch.num_actions).bool(), batch.action_mask.device)
        return cls(batch.sequences, batch.attention_mask, mask, batch.packed_seq_lens, batch.num_actions, **more)

    def to(self, device: torch.device | str) -> ModelInputs:
        """The same inputs with every tensor on `device`; a new object, the batch stays where it is."""
        moved = map_tensors(vars(self), partial(to_device, device=device))
        return ModelInputs(**moved)

    @property
    def is_packed(self) -> bool:
        """Whether all samples lie in one row, without padding."""
        return self.packed_seq_lens is not None

    @property
    def sample_lengths(self) -> list[int]:
        """Columns that each sample takes in its row."""
        if self.packed_seq_lens is not None:
            return self.packed_seq_lens
        return [self.sequences.shape[1]] * self.sequences.shape[0]

    def action_indices(self) -> T:
        """(B, A) long, on the host: where in the flattened (rows * S) hidden states each action is predicted from.

        That is the position before the action. Rows of masked columns are clamped into range; the mask drops them.
        """
        lengths, width = torch.tensor(self.sample_lengths), self.action_mask.shape[1]
        actions = width if self.num_actions is None else torch.tensor(self.num_actions)
        first = lengths.cumsum(0) - actions - 1
        indices = first.unsqueeze(1) + torch.arange(width)
        return indices.clamp(0, self.sequences.numel() - 1)


def media_of_ranks(inputs: Sequence[ModelInputs]) -> list[frozenset[str]]:
    """The `media` of each of these forwards, of which every rank makes as many. A collective."""
    own = torch.tensor([[name in each.vision.media for name in PATCHES] for each in inputs], dtype=torch.float32)
    return [frozenset(compress(PATCHES, has)) for has in collectives.all_reduce_max(own).bool().tolist()]
