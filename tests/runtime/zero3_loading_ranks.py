"""Run by two ranks: models that are divided while they load, against whole ones, and the most that a rank holds."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from diffusers import DiffusionPipeline
from launched import leave
from torch import nn

from lightrft_visual.config.vl import DistributedConfig, ModelConfig
from lightrft_visual.models.diffusion.layers import load_divided
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.weight_copies import gathered
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy


class Held:
    """The most bytes that the parameters made in this process had at one time, whole ones and parts of divided ones."""

    def __init__(self) -> None:
        self.alive: dict[int, weakref.ref] = {}
        self.peak = 0

    def measure(self) -> None:
        storages = {}
        for parameter in [reference() for reference in self.alive.values()]:
            for tensor in (getattr(parameter, "data", None), getattr(parameter, "ds_tensor", None)):
                if tensor is not None and tensor.device.type != "meta":
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(storages.values()))

    def after(self, function: Callable) -> Callable:
        def measured(*arguments, **named):
            result = function(*arguments, **named)
            self.measure()
            return result

        return measured

    @contextmanager
    def watching(self):
        made, init = nn.Parameter.__new__, partition_parameters.Init
        convert, enter = init._convert_to_deepspeed_param, deepspeed.zero.GatheredParameters.__enter__

        def new(cls, *arguments, **named):
            parameter = made(cls, *arguments, **named)
            self.alive[id(parameter)] = weakref.ref(parameter)
            self.measure()
            return parameter

        nn.Parameter.__new__ = new
        init._convert_to_deepspeed_param = self.after(convert)
        deepspeed.zero.GatheredParameters.__enter__ = self.after(enter)
        try:
            yield self
        finally:
            nn.Parameter.__new__ = made
            init._convert_to_deepspeed_param, deepspeed.zero.GatheredParameters.__enter__ = convert, enter


def compared(load_divided: Callable[[], nn.Module], load_whole: Callable[[], nn.Module]) -> dict:
    """What differs between both, how much this rank held, and the bytes of the model and of its largest module."""
    with Held().watching() as held:
        divided = load_divided()
    whole = load_whole()
    theirs, different = dict(whole.named_parameters()), []
    ours = dict(divided.named_parameters())
    with gathered(list(ours.values())):
        for name in ours.keys() | theirs.keys():
            mine, other = ours.get(name), theirs.get(name)
            if not same(mine, other):
                different.append(name)
    buffers = dict(divided.named_buffers())
    different += [name for name, buffer in whole.named_buffers() if not same(buffers.get(name), buffer)]
    own = [sum(p.nbytes for p in module.parameters(recurse=False)) for module in whole.modules()]
    return {
        "different": different,
        "peak": held.peak,
        "total": sum(p.nbytes for p in theirs.values()),
        "module": max(own),
    }


def same(mine: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return mine is not None and other is not None and mine.dtype == other.dtype and torch.equal(mine.cpu(), other)


def main(given: str, out: str) -> None:
    results = {}
    for name, folder, bf16 in json.loads(given):
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3), bf16=bf16)
        if not results:
            strategy.setup_distributed()
        if Path(folder, "model_index.json").is_file():
            results[name] = compared_pipelines(folder, strategy)
        else:
            results[name] = compared_transformers(folder, strategy)
    Path(out, f"{collectives.rank()}.json").write_text(json.dumps(results))


def compared_transformers(folder: str, strategy: DeepspeedStrategy) -> dict:
    def divided():
        with strategy.loading():
            return load_transformer(folder, ModelConfig(), strategy.dtype)

    return compared(divided, lambda: load_transformer(folder, ModelConfig(), strategy.dtype))


def compared_pipelines(folder: str, strategy: DeepspeedStrategy) -> dict:
    names = ("transformer", "transformer_2", "unet")

    def divided():
        return nn.ModuleDict(load_divided(folder, names, strategy.dtype, strategy.divide))

    def whole():
        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=strategy.dtype)
        return nn.ModuleDict({name: pipeline.components[name] for name in names if name in pipeline.components})

    return compared(divided, whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
