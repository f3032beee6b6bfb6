"""Single samples and the way from batches to samples and back, under the import path that LightRFT's users know."""

from ..experience.fields import zero_pad_sequences
from ..experience.items import (
    BufferItem,
    BufferItemDiffusion,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)

__all__ = [
    "BufferItem",
    "BufferItemDiffusion",
    "BufferItemVL",
    "is_vl_experience",
    "make_experience_batch",
    "remove_padding_in_sequences",
    "split_experience_batch",
    "zero_pad_sequences",
]
