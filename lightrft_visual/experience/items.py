"""Single samples of experience, and the way from batches to samples and back.

`split_experience_batch(make_experience_batch(items)) == items` for any mix, padded and packed. One routine serves
text, vision-language and diffusion: it reads the `FieldSpec` of each field. Every step takes linear time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DataError
from .codecs import make_fields, packed_lengths, split_fields
from .fields import Kind, replay_fields, values_equal
from .types import (
    BatchLayout,
    DiffusionFields,
    Experience,
    ExperienceDiffusion,
    ExperienceVL,
    KlField,
    Provenance,
    TextExtras,
    TextFields,
    VisionExtras,
    VisionFields,
)

T = torch.Tensor
AnyExperience = Experience | ExperienceVL | ExperienceDiffusion


class _ByValue:
    """Equal to a sample of the same class with the same fields: None-ness, shapes, dtypes and values (NaN is NaN)."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and values_equal(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


# Dataclass fields come in reverse order of the bases: the last base first.
@dataclass(eq=False)
class BufferItem(_ByValue, KlField, Provenance, TextExtras, TextFields):
    """One text sample.

    sequences (S) long: prompt and response, the last A tokens are the actions, from the first sampled one to the last;
    action_mask is false at those between them that were observed, where log-probs and advantages are 0;
    action_log_probs, base_action_log_probs, action_entropy, rollout_log_probs, teacher_log_probs, kl (A);
    values, returns, advantages (A), or (1) for the whole sample; attention_mask (S) long; action_mask (A) bool;
    group_id, sample_id, policy_version, valid ().
    """


@dataclass(eq=False)
class BufferItemVL(_ByValue, KlField, VisionExtras, Provenance, TextExtras, VisionFields):
    """One sample with any number of images and videos, also none.

    As BufferItem, and pixel_values (n_patches, patch_dim), image_grid_thws (n_images, 3), image_counts ();
    pixel_values_videos, video_grid_thws, video_counts likewise; video_seconds_per_grid (n_videos); raw_images: list of
    PIL images. These tensors, and those of other names that a model family reads, are in `vision`, shared by the
    samples of a prompt.
    """


@dataclass(eq=False)
class BufferItemDiffusion(_ByValue, Provenance, DiffusionFields):
    """One denoising trajectory of K steps: latents (K+1, C, ...), timesteps (K), log_probs (K), sigmas (K+1),
    prompt_embeds {name: tensor}, advantages () or (K); shared_embeds {name: (1, ...)}, shared by a prompt's samples."""


AnyItem = BufferItem | BufferItemVL | BufferItemDiffusion
_BATCH_OF: dict[type, type] = {
    BufferItem: Experience,
    BufferItemVL: ExperienceVL,
    BufferItemDiffusion: ExperienceDiffusion,
}
_ITEM_OF: dict[type, type] = {batch: item for item, batch in _BATCH_OF.items()}


def is_vl_experience(experience: Any) -> bool:
    """Whether a batch or a single sample has the vision attributes, also when they are None."""
    return hasattr(experience, "pixel_values")


def make_experience_batch(items: Sequence[AnyItem], packing_samples: bool = False) -> AnyExperience:
    """Batch single samples, padded or packed (see `experience.py` for both forms).

    A field that only some items have is filled for the others (masks with ones, ids with -1, else zeros); the batch's
    `layout` remembers that. A padded batch gets masks whenever padding was added, even if no item has one. Text items
    may stand among vision-language items.

    Raises DataError (a ValueError) on an empty list, on diffusion items mixed with others, of different shapes or to be
    packed, and on an item whose fields contradict each other; the message names the sample and the field.
    """
    if not items:
        raise DataError("cannot make an experience batch of an empty list of items")
    layout, classes = BatchLayout(), {type(item) for item in items}
    if classes == {BufferItem, BufferItemVL}:
        layout.text_only = [index for index, item in enumerate(items) if type(item) is BufferItem]
        items = [_recast(item, BufferItemVL) if type(item) is BufferItem else item for item in items]
    elif len(classes) > 1 or not classes <= _BATCH_OF.keys():
        raise DataError(f"these items cannot be in one batch: {', '.join(sorted(each.__name__ for each in classes))}")
    item_class = type(items[0])
    if packing_samples and item_class is BufferItemDiffusion:
        raise DataError("diffusion samples cannot be packed: set packing_samples to false")
    return _BATCH_OF[item_class](**make_fields(items, packing_samples, layout), layout=layout)


def _recast(item: AnyItem, target: type) -> AnyItem:
    """The same sample as `target`, by the fields that both classes have."""
    shared = replay_fields(type(item)).keys() & replay_fields(target).keys()
    return target(**{name: getattr(item, name) for name in shared})


def split_experience_batch(experience: AnyExperience, layout: BatchLayout | None = None) -> list[AnyItem]:
    """The samples of a batch, each owning its memory, so that the batch can be freed; vision inputs stay shared.

    A batch made by `make_experience_batch` gives back its items without padding. The rows of any other padded batch
    stay at full width: see `remove_padding_in_sequences`. Without image counts `raw_images` say whose images are;
    without these, each sample owns one if there are B of them. layout: in place of the batch's own. Raises DataError
    where ownership or lengths do not add up.
    """
    check_batch(experience)
    layout = layout or experience.layout or BatchLayout()
    item_class = _ITEM_OF[type(experience)]
    columns = split_fields(experience, replay_fields(item_class), layout)
    names = list(columns)
    items = [item_class(**dict(zip(names, values))) for values in zip(*columns.values(), strict=True)]
    for index in layout.text_only:
        items[index] = _recast(items[index], BufferItem)
    return items


def check_batch(experience: Any) -> None:
    """Raise DataError for anything that is no batch of samples."""
    if type(experience) not in _ITEM_OF:
        told = "; make_experience_batch makes one of items" if isinstance(experience, (*_BATCH_OF, list)) else ""
        raise DataError(f"not a batch of experience: {type(experience).__name__}{told}")


def strip_padding(experience: AnyExperience) -> list[AnyItem]:
    """The samples of a batch without padding: splits and strips in one copy.

    The same as `remove_padding_in_sequences(split_experience_batch(experience))`. Batches from
    `make_experience_batch`, packed ones and diffusion trajectories are only split: their items come as they are.
    """
    check_batch(experience)
    if isinstance(experience, ExperienceDiffusion) or experience.is_packed or experience.layout is not None:
        return split_experience_batch(experience)
    names = [name for name, spec in replay_fields(type(experience)).items() if spec.kind is Kind.ACTIONS]
    widths = {value.shape[1] for value in (getattr(experience, name) for name in names) if value is not None}
    if len(widths) != 1:
        raise DataError(f"the per-action fields of a batch must have one width, found {sorted(widths)}")
    width = experience.sequences.shape[1] - widths.pop()
    spans = _real_spans(experience.sequences, experience.attention_mask, experience.action_mask, width)
    return split_experience_batch(experience, BatchLayout(spans=spans, prompt_width=width))


def remove_padding_in_sequences(items: list[AnyItem]) -> list[AnyItem]:
    """Strip left and right padding of each item, in place; returns the list.

    The attention mask decides what is padding; without one, zeros before the first and after the last token that is
    not zero or is a sampled action. Zeros and masked tokens between real ones stay. Per-action fields are cut to the
    response's real tokens. After LightRFT.
    """
    for item in items:
        if not isinstance(item, BufferItemDiffusion):
            _strip_item(item)
    return items


def part_of(item: AnyItem) -> int:
    """Which part of the loss a sample belongs to; 0 where there is one."""
    return int((item.info or {}).get("loss_part", 0))


def _strip_item(item: BufferItem | BufferItemVL) -> None:
    total, (_, (actions,)) = len(item.sequences), packed_lengths([item])
    masks = [None if mask is None else mask.unsqueeze(0) for mask in (item.attention_mask, item.action_mask)]
    prompt = total - actions
    ((start, stop),) = _real_spans(item.sequences.unsqueeze(0), *masks, width=prompt)
    if (start, stop) == (0, total):
        return
    own = slice(max(start - prompt, 0), max(stop - prompt, 0))
    kept = {Kind.TOKENS: slice(start, stop), Kind.ACTIONS: own, Kind.NUMBERS: own}
    for name, spec in replay_fields(type(item)).items():
        value = getattr(item, name)
        whole = spec.kind is Kind.NUMBERS and value is not None and len(value) == 1  # of the sample, not of an action
        if spec.kind in kept and value is not None and not whole:
            setattr(item, name, value[kept[spec.kind]].clone())


def _real_spans(sequences: T, attention_mask: T | None, action_mask: T | None, width: int) -> list[tuple[int, int]]:
    """First and last + 1 real token of each row of (B, S); an empty span at the prompt's end for a row without any."""
    real = sequences != 0 if attention_mask is None else attention_mask != 0
    if attention_mask is None and action_mask is not None:
        real[:, width:] |= action_mask.bool()
    found = real.any(dim=1)
    first = torch.where(found, real.int().argmax(dim=1), width)
    last = torch.where(found, real.shape[1] - real.flip(1).int().argmax(dim=1), width)
    return list(zip(first.tolist(), last.tolist()))
