"""What diffusion models are told besides latents and time: tensors by name, of texts of different lengths.

Families whose texts differ in length (Qwen-Image, Z-Image) name a mask (L) beside each text (L, ...). One text has its
own length; in a batch all are padded with zeros to the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

T = torch.Tensor
Conditions = dict[str, T]
NEGATIVE = "negative_"  # conditions of the unguided branch carry this prefix
MASK = "mask"


def widened(value: T, length: int, fill: float = 0) -> T:
    """(B, L, ...) to (B, length, ...), with `fill` behind what is there; length is at least L."""
    missing = length - value.shape[1]
    return pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=fill) if missing else value


def joined(values: Sequence[T]) -> T:
    """Tensors (b, L, ...) of texts, or of any one shape (b, ...), behind each other along the first axis."""
    if len({value.shape[1:] for value in values}) > 1:
        values = [widened(value, max(each.shape[1] for each in values)) for value in values]
    return torch.cat(list(values))


def separate(conditions: Conditions) -> list[Conditions]:
    """The conditions (1, …) of each text of a batch, in memory of their own, without the padding up to others."""
    lengths, size = text_lengths(conditions), len(next(iter(conditions.values())))
    return [
        {
            name: value[index : index + 1, : lengths[name][index] if name in lengths else None].clone()
            for name, value in conditions.items()
        }
        for index in range(size)
    ]


def stacked(samples: Sequence[Conditions], device: torch.device) -> Conditions:
    """Conditions (B, …) on the device of samples that refer to theirs, (1, …) each; what several share moves once."""
    moved = {id(value): value.to(device) for sample in samples for value in sample.values()}
    return {name: joined([moved[id(sample[name])] for sample in samples]) for name in samples[0]}


def texts(conditions: Conditions) -> dict[str, T]:
    """The mask of each condition, by its name, that is as long as a text is: of one sample (L), of a batch (B, L)."""
    found = {}
    for name, value in conditions.items():
        mask = conditions.get(NEGATIVE + MASK if name.startswith(NEGATIVE) else MASK)
        if mask is not None and value.shape[: mask.dim()] == mask.shape:
            found[name] = mask
    return found


def used_widths(mask: T) -> list[int]:
    """Tokens of each text of a batch that is padded behind, by its mask (B, L): all L of a mask without contents (meta
    tensors, as plans compute with)."""
    return [mask.shape[1]] * len(mask) if mask.is_meta else mask.sum(dim=1).tolist()


def text_lengths(conditions: Conditions) -> dict[str, list[int]]:
    """For each condition of a batch that is padded, by its name: the length of every sample's own text, at least 1."""
    masks = texts(conditions)
    lengths = {
        id(mask): (mask.bool() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp_min(1).tolist()
        for mask in masks.values()
    }
    return {name: lengths[id(mask)] for name, mask in masks.items()}
