"""An accelerator that records the host's operations as CUDA graphs record kernels: a replay runs them on the addresses
that they had, and nothing of Python between them."""

from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
FORBIDDEN = "operation not permitted when stream is capturing"


def tensors(values):
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class CopiesFromTheHost(TorchFunctionMode):
    """Numbers of the host as a tensor of the device are a copy that waits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") is not None:
            raise RuntimeError(FORBIDDEN)
        return func(*args, **(kwargs or {}))


class Graph(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.replays = [], 0

    def pool(self):
        return 0, 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in READS:
            raise RuntimeError(FORBIDDEN)
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


class Stream:
    def wait_stream(self, stream): ...


class Recorder:
    """What DeepSpeed's accelerators have for graphs. graphs, pools: of all that were recorded."""

    def __init__(self):
        super().__init__()
        self.graphs, self.pools = [], []

    def create_graph(self):
        return Graph()

    def Stream(self):
        return Stream()

    def current_stream(self, device_index=None):
        return Stream()

    def stream(self, stream):
        return nullcontext()

    @contextmanager
    def capture_to_graph(self, graph, pool=None, stream=None):
        self.graphs.append(graph)
        self.pools.append(pool)
        try:
            with graph, CopiesFromTheHost():
                yield
        except RuntimeError as error:  # as torch.cuda.graph ends its recording first
            raise RuntimeError("operation failed due to a previous error during capture") from error
        graph.forget_results()

    def replay_graph(self, graph):
        graph.replay()


class Recording(Recorder):
    """A host that records them."""

    def device_name(self):
        return "cpu"
