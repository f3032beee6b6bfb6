"""`cuda_graphs`: while images are drawn, an accelerator starts each forward of a denoiser as one recorded graph.

A forward of a few small images is thousands of short kernels, and the host takes longer to start them than the card to
run them. A graph (CUDA's, by DeepSpeed's accelerator) starts them all at once. It computes on the addresses that it was
recorded with. So inputs are copied there and results from there, and it is recorded anew where weights lie elsewhere,
as those of an average do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...errors import ConfigError
from .policy import DiffusionPolicy

T = torch.Tensor
MOST = 16  # forms of inputs that a network keeps graphs of
TOLERANCE = 1e-2  # largest difference of a replay from the forward, by the largest value


def check_graphs() -> None:
    """Raise ConfigError where the accelerator records none."""
    if get_accelerator().create_graph() is None:
        name = get_accelerator().device_name()
        raise ConfigError(f"cuda_graphs: DeepSpeed records no graphs on {name}: leave it out")


def on_graphs(velocity: Callable[..., T], policy: DiffusionPolicy) -> Callable[..., T]:
    """`velocity`, with the denoisers' forwards by graphs where no gradient is recorded; others stay as they are. Raises
    ConfigError as `check_graphs`."""
    check_graphs()
    replayed = [ForwardGraphs(denoiser) for denoiser in policy.denoisers.values()]

    def call(*args: Any, **kwargs: Any) -> T:
        for each in replayed:
            each.serving = not torch.is_grad_enabled()
        try:
            return velocity(*args, **kwargs)
        finally:
            for each in replayed:
                each.serving = False

    return call


class ForwardGraphs:
    """Takes the place of a network's forward. While it is `serving` it replays a graph for each form of inputs: shapes
    and types of tensors, and all other values."""

    def __init__(self, network: nn.Module) -> None:
        self.plain, self.serving = network.forward, False
        self._weights = [*network.parameters(), *network.buffers()]
        self._recorded: dict[Hashable, _Recorded] = {}
        self._at: list[int] = []  # addresses of the weights that the graphs read
        self._proven: set[Hashable] = set()  # forms whose graph was compared with the forward
        network.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.serving:
            return self.plain(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        at = [weight.data_ptr() for weight in self._weights]
        if at != self._at:
            self._recorded.clear()
            self._at = at
        key = (tree, *(_form(leaf) for leaf in leaves))
        if key not in self._recorded:
            if len(self._recorded) == MOST:
                self._recorded.pop(next(iter(self._recorded)))
            pool = next((each.graph.pool() for each in self._recorded.values()), None)
            made = _Recorded(self.plain, leaves, tree, pool)
            if key not in self._proven:
                made.compare(self.plain, leaves)
                self._proven.add(key)
            self._recorded[key] = made
        return self._recorded[key].replay(leaves)


class _Recorded:
    """A graph with the tensors that it reads and writes. pool: memory of the graphs before, which never run at once."""

    def __init__(self, forward: Callable[..., Any], leaves: list[Any], tree: Any, pool: Any) -> None:
        self._given = [leaf.clone() if isinstance(leaf, T) else leaf for leaf in leaves]
        self._arguments = tree_unflatten(self._given, tree)
        accelerator = get_accelerator()
        self.graph, stream = accelerator.create_graph(), accelerator.Stream()
        stream.wait_stream(accelerator.current_stream())
        try:
            with accelerator.stream(stream):  # libraries set up what they keep for a stream before it is recorded
                self._run(forward)
                with accelerator.capture_to_graph(self.graph, pool=pool, stream=stream):
                    made = self._run(forward)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            told = "cuda_graphs: this model's forward cannot be recorded, leave it out"
            raise ConfigError(f"{told}: {error.__context__ or error}") from error
        accelerator.current_stream().wait_stream(stream)
        self._made, self._tree = tree_flatten(made)

    def _run(self, forward: Callable[..., Any]) -> Any:
        args, kwargs = self._arguments
        return forward(*args, **kwargs)

    def replay(self, leaves: list[Any]) -> Any:
        """The forward of these inputs; results are copies, as the next replay writes over its own."""
        for own, leaf in zip(self._given, leaves, strict=True):
            if isinstance(own, T):
                own.copy_(leaf)
        get_accelerator().replay_graph(self.graph)
        return tree_unflatten([each.clone() if isinstance(each, T) else each for each in self._made], self._tree)

    def compare(self, forward: Callable[..., Any], leaves: list[Any]) -> None:
        """Raise ConfigError where a replay is not the forward: something in it was not recorded."""
        replayed, plain = tree_leaves(self.replay(leaves)), tree_leaves(self._run(forward))
        for found, expected in zip(replayed, plain, strict=True):
            if isinstance(expected, T):
                off = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6)
                if not off <= TOLERANCE:
                    raise ConfigError(f"cuda_graphs: a replay is {off:.2g} off the forward: leave it out")


def _form(leaf: Any) -> Hashable:
    """What a graph is recorded for. Raises ConfigError for a tensor on the host, whose values would be recorded."""
    if not isinstance(leaf, T):
        return type(leaf), leaf
    if leaf.device.type != get_accelerator().device_name():
        raise ConfigError("cuda_graphs: this model reads a tensor on the host: leave it out")
    return leaf.shape, leaf.dtype, leaf.stride()
