"""ZeRO-3 divides models while they load: the same weights, and no rank ever holds a whole model."""

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import pytest
import tiny_families
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import z3_leaf_module
from diffusers import DiffusionPipeline
from forked import on_ranks
from tiny_models import checkpoint_of
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightrft_visual.config.vl import DistributedConfig, ModelConfig
from lightrft_visual.models.diffusion.layers import load_divided
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.weight_copies import gathered
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy
from lightrft_visual.runtime.zero3_loading import gather_by_blocks


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


def by_model(given: list[tuple[str, str, bool]]) -> dict[str, dict]:
    """Models that are divided while they load, against whole ones, and the most that a rank holds."""
    results = {}
    for name, folder, bf16 in given:
        strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3), bf16=bf16)
        if not results:
            strategy.setup_distributed()
        if Path(folder, "model_index.json").is_file():
            results[name] = compared_pipelines(folder, strategy)
        else:
            results[name] = compared_transformers(folder, strategy)
    return results


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


class Block(GradientCheckpointingLayer):
    def __init__(self, numbers: int):
        super().__init__()
        self.first, self.second = nn.Linear(numbers // 2, 1, bias=False), nn.Linear(numbers // 2, 1, bias=False)


def test_blocks_are_gathered_at_once_up_to_the_largest_and_the_next_one_of_that_size_ahead():
    with torch.device("meta"):
        small, large = (
            nn.ModuleList([Block(1000), nn.Linear(9, 9)]),
            nn.ModuleList([Block(6 * 10**7), Block(6 * 10**8)]),
        )
    assert gather_by_blocks(nn.Linear(9, 9)) == {}
    assert gather_by_blocks(small) == {"stage3_prefetch_bucket_size": 50_000_000}
    assert gather_by_blocks(large) == {"stage3_prefetch_bucket_size": 60_000_000}
    assert [z3_leaf_module(each) for each in (*small, *large)] == [True, False, True, False]


RANKS = 2
# Name of a model, and whether it is loaded in bfloat16.
MODELS = [
    ("qwen2_5_vl", True),
    ("qwen2+tied", False),
    ("janus", False),
    ("sd15", False),
    ("wan_two_experts", True),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("models")
    given = []
    for name, bf16 in MODELS:
        if hasattr(tiny_families, name):
            torch.manual_seed(0)
            getattr(tiny_families, name)().save_pretrained(root / name)
            given.append((name, str(root / name), bf16))
        else:
            given.append((name, checkpoint_of(root, name).path, bf16))
    return on_ranks(by_model, given, ranks=RANKS)


@pytest.mark.parametrize("name", [name for name, _ in MODELS])
def test_a_divided_model_has_the_weights_and_buffers_of_a_whole_one(results, name):
    assert all(rank[name]["different"] == [] for rank in results)


@pytest.mark.parametrize("name", [name for name, _ in MODELS])
def test_a_rank_holds_its_part_and_one_module_at_a_time(results, name):
    for rank in results:
        held = rank[name]
        # A tied head is made before it is tied.
        made = held["total"] + (held["module"] if name.endswith("+tied") else 0)
        assert 0 < held["peak"] <= made / RANKS + held["module"] + 4 * RANKS < held["total"]  # parts of equal size
