"""An accelerator that records the host's operations as CUDA graphs record kernels: a replay runs them on the addresses
that they had, and nothing of Python between them."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


def tensors(values):
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class Graph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.replays = [], 0

    def pool(self):
        return 0, 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tensors(made)))
        return made

    def forget_results(self):
        """A recording computes nothing: what was made is not there before the first replay."""
        for _, args, kwargs, made in self.operations:
            given = {each.untyped_storage().data_ptr() for each in tensors((args, kwargs))}
            for each in made:
                if each.is_floating_point() and each.untyped_storage().data_ptr() not in given:
                    each.fill_(torch.nan)

    def replay(self):
        self.replays += 1
        for func, args, kwargs, made in self.operations:
            for own, new in zip(made, tensors(func(*args, **kwargs)), strict=True):
                if own.data_ptr() != new.data_ptr():
                    own.copy_(new)


class Recorder:
    """What DeepSpeed's accelerators have for graphs. graphs, pools: of all that were recorded."""

    def __init__(self):
        super().__init__()
        self.graphs, self.pools = [], []

    def create_graph(self):
        return Graph()

    @contextmanager
    def capture_to_graph(self, graph, pool=None):
        self.graphs.append(graph)
        self.pools.append(pool)
        with graph:
            yield
        graph.forget_results()

    def replay_graph(self, graph):
        graph.replay()


class Recording(Recorder):
    """A host that records them."""

    def device_name(self):
        return "cpu"
