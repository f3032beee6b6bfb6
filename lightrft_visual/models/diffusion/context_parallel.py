"""A denoiser's forward over several ranks, by diffusers' context parallelism (Ulysses, arXiv 2309.14509).

A plan says at which modules tokens are divided over the ranks and gathered again; attention exchanges slices of tokens
for slices of heads. Gathering gives each rank the gradient of its own tokens, so the sum over a group's ranks is the
gradient of one rank that has them all: see `runtime/sequence.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import ContextParallelConfig
from diffusers.hooks import HookRegistry
from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook
from diffusers.models._modeling_parallel import ContextParallelInput, ParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ...errors import ConfigError
from ...runtime import collectives
from .families.base import DiffusionFamily

T = torch.Tensor
HOOK = "sp_size {}"  # name of a hook, by its module's in the plan


class ContextParallel:
    """The denoisers of a family over each `size` ranks beside each other: whole, until `divide`.

    While they are divided, all ranks of a group call them together, with the same inputs, and each gets the whole
    prediction. `enable_parallelism` of diffusers is not used: it cannot be taken back, and needs an accelerator.

    Raises ConfigError where a denoiser cannot be divided. Making one is a collective of all ranks.
    """

    def __init__(self, family: DiffusionFamily, size: int) -> None:
        self.size, self._divided = size, family.divided_attention
        self._plans = [(each, _plan_of(each, family, size)) for each in family.denoisers().values()]
        self._config = _parallel_config(size, family.device)

    def divide(self) -> None:
        """From here on the ranks of a group share each forward."""
        for denoiser, plan in self._plans:
            for processor in _processors(denoiser, self._divided):
                processor._parallel_config = self._config
            for name, entry in plan.items():
                for module in _modules(denoiser, name):
                    hook = self._hook(entry, f"{type(denoiser).__name__} {name}".strip())
                    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK.format(name))

    def join(self) -> None:
        """From here on each rank computes whole forwards again."""
        for denoiser, plan in self._plans:
            for processor in _processors(denoiser, self._divided):
                processor._parallel_config = None
            for name in plan:
                for module in _modules(denoiser, name):
                    module._diffusers_hook.remove_hook(HOOK.format(name), recurse=False)

    def _hook(self, entry: Any, path: str) -> ContextParallelSplitHook | ContextParallelGatherHook:
        config = self._config.context_parallel_config
        if isinstance(entry, dict):
            return _EvenSplit(entry, config, path)
        return ContextParallelGatherHook(entry if isinstance(entry, list | tuple) else [entry], config)


class _EvenSplit(ContextParallelSplitHook):
    """diffusers' hook, with an error that says which sizes work in the place of an assertion."""

    def __init__(self, entry: dict, config: ContextParallelConfig, path: str) -> None:
        super().__init__(entry, config)
        self.path = path

    def _prepare_cp_input(self, x: T, cp_input: ContextParallelInput) -> T:
        if cp_input.expected_dims not in (None, x.dim()):
            return x
        tokens, size = x.shape[cp_input.split_dim], self.parallel_config.ulysses_degree
        if tokens % size:
            raise ConfigError(
                f"sp_size {size} does not divide the {tokens} tokens at {self.path}; such as "
                f"{tokens - tokens % size} or {tokens - tokens % size + size} would do. Tokens of images and videos "
                "follow height, width and num_frames, those of texts max_sequence_length"
            )
        return super()._prepare_cp_input(x, cp_input)


def _parallel_config(size: int, device: torch.device) -> ParallelConfig:
    world = collectives.world_size()
    mesh = init_device_mesh(device.type, (world // size, 1, size), mesh_dim_names=("data", "ring", "ulysses"))
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=size, mesh=mesh))
    config.setup(collectives.rank(), world, device, mesh=mesh)
    return config


def _plan_of(denoiser: nn.Module, family: DiffusionFamily, size: int) -> dict[str, Any]:
    """The family's plan, or the one that diffusers has of the model. ConfigError where it cannot be followed."""
    plan, name = family.context_plan or getattr(denoiser, "_cp_plan", None), type(denoiser).__name__
    if plan is None:
        raise ConfigError(f"sp_size: diffusers has no plan that divides the tokens of {name}; leave it at 1")
    if sum(not isinstance(entry, dict) for entry in plan.values()) != 1:  # what follows would count on every rank
        raise ConfigError(f"sp_size: {name} gathers its tokens before its output, which is not proven; leave it at 1")
    if not all(hasattr(each, "_parallel_config") for each in _processors(denoiser, family.divided_attention)):
        raise ConfigError(f"sp_size: the attention of {name} sees the tokens of one rank alone; leave it at 1")
    if denoiser.config.num_attention_heads % size:
        heads = denoiser.config.num_attention_heads
        raise ConfigError(f"sp_size {size} does not divide the {heads} attention heads of {name}; use a divisor")
    return plan


def _processors(denoiser: nn.Module, divided: str) -> Iterator[Any]:
    """What computes attention in each of the denoiser's layers, where the layer's name ends so."""
    layers = (module for name, module in denoiser.named_modules() if name.endswith(divided))
    return (layer.processor for layer in layers if getattr(layer, "processor", None) is not None)


def _modules(denoiser: nn.Module, name: str) -> list[nn.Module]:
    """Those that a plan names; `blocks.*` are all of a list."""
    if name.endswith(".*"):
        return list(denoiser.get_submodule(name[:-2]).children())
    return [denoiser.get_submodule(name)]
