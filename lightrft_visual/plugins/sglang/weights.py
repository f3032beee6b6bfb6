"""The trainer's weights on their way to SGLang: flat buckets, each sent as one handle on device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...errors import RolloutError
from ...rollout.weight_sync import BUCKET_BYTES, in_buckets
from .mapping import sglang_name

T = torch.Tensor


def buckets(named_tensors: Iterable[tuple[str, T]], most: int = BUCKET_BYTES) -> Iterator[list[tuple[str, T]]]:
    """Neighbours of one dtype and together at most `most` bytes, or one tensor that is larger, by SGLang's names.

    A bucket is one row of bytes: of several dtypes some would not start at a multiple of their size.
    """
    for _, alike in groupby(named_tensors, lambda each: each[1].dtype):
        for bucket in in_buckets(alike, most, lambda each: each[1].nbytes):
            yield [(sglang_name(name), tensor) for name, tensor in bucket]


def send(engine: Any, named_tensors: Iterable[tuple[str, T]]) -> None:
    """Give `sglang.Engine` new weights; its caches stay. Raises RolloutError where it refuses them."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        monkey_patch_torch_reductions()  # the other process may count devices otherwise: named by their uuid
    device = accelerator.current_device_name()
    _accepted(engine.begin_weight_update())
    try:
        for bucket in buckets(named_tensors):
            flat = FlattenedTensorBucket(named_tensors=[(name, tensor.to(device)) for name, tensor in bucket])
            handed = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            payload = MultiprocessingSerializer.serialize(handed)
            _accepted(engine.update_weights_from_tensor([payload], load_format="flattened_bucket", flush_cache=False))
    finally:
        ended = engine.end_weight_update()
    _accepted(ended)


def _accepted(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RolloutError(f"SGLang refuses the weights: {message}")
