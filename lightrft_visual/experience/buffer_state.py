"""Samples as plain tensors, numbers, strings and containers, which `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import CheckpointError
from .fields import Kind, replay_fields
from .info_layout import InfoLayout
from .items import AnyItem, BufferItemDiffusion, make_experience_batch, split_experience_batch
from .types import BatchLayout, Experience, ExperienceDiffusion, ExperienceVL
from .vision import VisionTensors

_CLASSES: dict[str, type] = {each.__name__: each for each in (Experience, ExperienceVL, ExperienceDiffusion)}
_PNG, _VISION = "__png__", "__vision__"
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype)


def items_to_state(items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """A few packed batches instead of thousands of little tensors; tensors are copied to the CPU.

    Images are kept as PNG. Raises CheckpointError on an object that cannot be stored safely, with its place.
    """
    runs = [list(run) for _, run in itertools.groupby(items, key=_batchable)]
    return [_batch_to_state(run) for run in runs]


def items_from_state(state: Sequence[dict[str, Any]]) -> list[AnyItem]:
    """The inverse of `items_to_state`."""
    items: list[AnyItem] = []
    for each in state:
        values = _decode(each["fields"])
        layout = dict(each["layout"])
        layout["info"] = InfoLayout(**layout["info"])
        batch = _CLASSES[each["class"]](**values, layout=BatchLayout(**layout))
        items.extend(split_experience_batch(batch))
    return items


def _batchable(item: AnyItem) -> tuple:
    """Consecutive items with the same value go into one batch: trajectories must have equal shapes."""
    if not isinstance(item, BufferItemDiffusion):
        return ()
    specs = replay_fields(type(item)).items()
    tensors = {name: getattr(item, name) for name, spec in specs if spec.kind is Kind.SAMPLE}
    tensors.update(item.prompt_embeds or {})
    return tuple((name, value.shape, value.dtype) for name, value in tensors.items() if value is not None)


def _batch_to_state(items: list[AnyItem]) -> dict[str, Any]:
    batch = make_experience_batch(items, packing_samples=not isinstance(items[0], BufferItemDiffusion))
    names = [*replay_fields(type(batch))]
    if batch.layout.spans is None and not isinstance(batch, ExperienceDiffusion):
        names += ["packed_seq_lens", "num_actions"]
    return {
        "class": type(batch).__name__,
        "fields": {name: _encode(getattr(batch, name), name) for name in names},
        "layout": _encode(asdict(batch.layout), "layout"),
    }


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, VisionTensors):
        distinct = list({id(sample): sample for sample in value.samples}.values())
        indices = {id(sample): index for index, sample in enumerate(distinct)}
        order = [indices[id(sample)] for sample in value.samples]
        return {_VISION: _encode(distinct, where), "samples": order}
    if isinstance(value, dict):
        return {key: _encode(each, f"{where}[{key}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encode(each, f"{where}[{index}]") for index, each in enumerate(value))
    if isinstance(value, Image.Image):
        return {_PNG: _png(value, where)}
    if type(value) not in _PLAIN and not isinstance(value, torch.dtype):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which a checkpoint of the replay buffer cannot hold"
        )
    return value


def _png(image: Image.Image, where: str) -> torch.Tensor:
    stream = io.BytesIO()
    try:
        image.save(stream, format="PNG")
    except OSError as error:
        raise CheckpointError(f"{where}: an image of mode {image.mode} cannot be stored as PNG") from error
    return torch.from_numpy(np.frombuffer(stream.getvalue(), dtype=np.uint8).copy())


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_PNG}:
            return _open_png(value[_PNG])
        if _VISION in value:
            distinct = _decode(value[_VISION])
            return VisionTensors(distinct[index] for index in value["samples"])
        return {key: _decode(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_decode(each) for each in value)
    return value


def _open_png(data: torch.Tensor) -> Image.Image:
    with Image.open(io.BytesIO(data.numpy().tobytes()), formats=["PNG"]) as image:
        image.load()
        return image
