"""ZeRO-3 from the first byte: models are divided over the ranks while they load, so that no rank holds a whole one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.nn as nn
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, is_zero_param
from deepspeed.utils import set_z3_leaf_module
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer

Divide = Callable[[Iterable[nn.Parameter]], None]  # leaves each rank its part of parameters that still are whole
PREFETCHED = 50_000_000  # numbers that DeepSpeed gathers ahead, if it is not told otherwise
LARGEST_BLOCK = 500_000_000  # half of what it keeps together: a block at work, and the next one that is on its way


@contextmanager
def loading_divided(settings: dict[str, Any]) -> Iterator[None]:
    """Models that transformers loads inside are divided module by module; settings: DeepSpeed's, of stage 3.

    A rank then holds its part of the weights and one whole module at a time. `zero.Init` by itself would also round
    each floating-point buffer, such as the frequencies of rotary positions, to the training precision: here it chooses
    the device only, and the precision is that of the loading.
    """
    known_to_transformers = HfDeepSpeedConfig(settings)  # by a weak reference
    dividing = partial(deepspeed.zero.Init, tensor_overrides=[DeepSpeedTensorOverride.device])
    try:
        # What weights that are overwritten are drawn from is used again.
        with patch.object(deepspeed.zero, "Init", dividing), torch.random.fork_rng([]):
            yield
    finally:
        unset_hf_deepspeed_config()
        del known_to_transformers


@contextmanager
def reading_across(model: nn.Module) -> Iterator[None]:
    """Modules may read divided weights of others, as towers read their table of positions and tied heads the
    embeddings: DeepSpeed gathers those only in a forward of its engine, and here in any other one too."""
    held = [module._parameters for module in model.modules() if hasattr(module._parameters, "_in_forward")]
    for each in held:
        each._in_forward = True
    try:
        yield
    finally:
        for each in held:
            each._in_forward = False


def gather_by_blocks(model: nn.Module) -> dict[str, int]:
    """Have ZeRO-3 gather each block of a transformers model at once, to the settings of DeepSpeed that this takes, by
    which the next block comes while one is at work. To the hooks of all layers the host would give more time than to
    the layers.

    Not blocks of diffusers, which are called by keywords: DeepSpeed, which looks for gradients of what is given by
    position, would keep their weights until backward ends. Nor those of more than LARGEST_BLOCK numbers.
    """
    blocks = blocks_at_once(model)
    for block in blocks:
        set_z3_leaf_module(block, True)
    return {"stage3_prefetch_bucket_size": max(PREFETCHED, *blocks.values())} if blocks else {}


def blocks_at_once(model: nn.Module) -> dict[nn.Module, int]:
    """Those that `gather_by_blocks` has gathered at once, with how many numbers each holds."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    sizes = {each: sum(getattr(p, "ds_numel", p.numel()) for p in each.parameters()) for each in blocks}
    return {each: size for each, size in sizes.items() if size <= LARGEST_BLOCK}


def divide(parameters: Iterable[nn.Parameter], settings: dict[str, Any]) -> None:
    """Leave each rank its part of the parameters that still are whole, one after the other, with the values of rank 0.

    All ranks call it. They go to the device singly: DeepSpeed's engine would first move the whole module there.
    """
    whole = [parameter for parameter in parameters if not is_zero_param(parameter)]
    if whole:
        deepspeed.zero.Init(module=nn.ParameterList(whole), config_dict_or_path=settings)
