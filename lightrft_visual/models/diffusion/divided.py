"""Denoisers of a pipeline read weight by weight and divided at once (ZeRO-3): no rank ever holds a whole one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import nn
from transformers.modeling_utils import local_torch_dtype

from ...errors import ConfigError
from ...runtime import collectives
from ...runtime.zero3_loading import Divide

T = torch.Tensor


def load_divided(
    path: str, names: Iterable[str], dtype: torch.dtype, divide: Divide, cast: Collection[str] = ()
) -> dict[str, ModelMixin]:
    """The pipeline's parts of these names that it has, each divided over the ranks; all ranks call it.

    Args:
        path: a pipeline folder or hub id.
        dtype: of the weights. What a model of diffusers keeps in fp32 stays so, except in the parts named in `cast`.
        divide: the strategy's.

    Returns:
        The parts by name. One that is no model of diffusers, or whose weights are not in safetensors files, is left
        out: the pipeline loads it whole.

    Raises:
        ConfigError: a file lacks a weight, or holds it in another shape.
    """
    folder = Path(path if Path(path).is_dir() else DiffusionPipeline.download(path))
    index = json.loads((folder / "model_index.json").read_text())
    parts = {}
    for name in names:
        library, kind = index.get(name) or (None, None)
        if library == "diffusers" and (files := weight_files(folder / name)):
            kept = () if name in cast else getattr(diffusers, kind)._keep_in_fp32_modules or ()
            parts[name] = _load(getattr(diffusers, kind), folder / name, _Weights(files, dtype, kept), divide)
    return parts


def weight_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of each weight of a model's folder; {} where the weights are in another format."""
    listed = folder / f"{SAFETENSORS_WEIGHTS_NAME}.index.json"
    if listed.is_file():
        return {name: folder / file for name, file in json.loads(listed.read_text())["weight_map"].items()}
    single = folder / SAFETENSORS_WEIGHTS_NAME
    if not single.is_file():
        return {}
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


class _Weights:
    """Weights by name, read when they are asked for, in the precision that they are used in."""

    def __init__(self, files: dict[str, Path], dtype: torch.dtype, kept_in_fp32: Collection[str]) -> None:
        self.files, self.dtype, self.kept = files, dtype, set(kept_in_fp32)

    def read(self, name: str, shape: torch.Size, values: bool = True) -> T:
        """The weight, or where its values are not wanted a tensor like it. Raises ConfigError where it does not fit."""
        if name not in self.files:
            raise ConfigError(f"{self._folder} lacks the weight {name}")
        with safe_open(self.files[name], "pt") as file:
            found = tuple(file.get_slice(name).get_shape())
            if found != tuple(shape):
                raise ConfigError(f"{self._folder}: {name} is {found}, the model's is {tuple(shape)}")
            value = file.get_tensor(name) if values else torch.empty(shape)
        return value.to(torch.float32 if self.kept.intersection(name.split(".")) else self.dtype)

    @property
    def _folder(self) -> Path:
        return next(iter(self.files.values())).parent


def _load(kind: type[ModelMixin], folder: Path, weights: _Weights, divide: Divide) -> ModelMixin:
    """Modules are filled and divided one by one, with the values that rank 0 reads."""
    # What is drawn for weights that are overwritten must not change what is drawn later: adapters start alike under
    # every ZeRO stage.
    with torch.random.fork_rng([]), init_empty_weights(), local_torch_dtype(weights.dtype):
        model = kind.from_config(kind.load_config(folder))
    for prefix, module in model.named_modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            value = weights.read(_joined(prefix, name), empty.shape, collectives.is_rank_0())
            module.register_parameter(name, nn.Parameter(value))
        divide(module.parameters(recurse=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if _joined(prefix, name) in weights.files:
                module.register_buffer(name, weights.read(_joined(prefix, name), buffer.shape))
    model.register_to_config(_name_or_path=str(folder))
    return model.eval()


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
