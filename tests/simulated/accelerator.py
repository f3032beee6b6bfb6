"""DeepSpeed's view of the device `sim`, and a process group that takes its tensors only, as NCCL takes CUDA's only."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from .device import NAME, load
from .recorded_graphs import Recorder

BACKEND = "simccl"


class SimAccelerator(Recorder, CPU_Accelerator):
    """One simulated device a process. Streams and events do nothing, as every operation is over when it returns."""

    def __init__(self) -> None:
        super().__init__()
        self._name = NAME
        self._communication_backend_name = BACKEND
        self._native = load()

    def create_op_builder(self, op_name):
        """Without the host's collectives over shared memory, which no accelerator has and DeepSpeed would compile."""
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)

    def device_name(self, device_index=None):
        return NAME if device_index is None else f"{NAME}:0"

    def device(self, device_index=None):
        return torch.device(NAME, 0)

    def current_device(self):
        return 0

    def current_device_name(self):
        return f"{NAME}:0"

    def device_count(self):
        return 1

    def on_accelerator(self, tensor):
        return tensor.device.type == NAME

    def memory_allocated(self, device_index=None):
        return self._native.allocated()

    def max_memory_allocated(self, device_index=None):
        return self._native.peak()

    def reset_peak_memory_stats(self, device_index=None):
        self._native.reset_peak()

    def total_memory(self, device_index=None):
        return 80 << 30

    def available_memory(self, device_index=None):
        return self.total_memory() - self._native.allocated()


def _tensor_class(dtype: torch.dtype) -> property:
    """What `torch.cuda.FloatTensor` and its like are: a tensor of the device from a list, or of a given size."""

    def make(*content):
        if content and not isinstance(content[0], int):
            return torch.tensor(content[0], dtype=dtype, device=NAME)
        return torch.empty(*content, dtype=dtype, device=NAME)

    return property(lambda self: make)


for _name, _dtype in (
    ("Float", torch.float32), ("Double", torch.float64), ("BFloat16", torch.bfloat16), ("Half", torch.float16),
    ("Byte", torch.uint8), ("Int", torch.int32), ("Long", torch.int64),
):  # fmt: skip
    setattr(SimAccelerator, f"{_name}Tensor", _tensor_class(_dtype))


class _Done(dist._Work):
    """A finished operation with its results."""

    def __init__(self, work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout=timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        return True


class SimProcessGroup(dist.ProcessGroup):
    """Collectives over tensors of the device, done by gloo on the same memory; host tensors are refused."""

    def __init__(self, store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._native = load()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]  # object collectives go through it too, as they do with NCCL

    def getBackendName(self) -> str:
        return BACKEND

    def _host(self, tensors):
        """The same memory as host tensors, through any nesting of lists."""
        if isinstance(tensors, (list, tuple)):
            return [self._host(each) for each in tensors]
        if tensors.device.type != NAME:
            raise RuntimeError(f"No backend type associated with device type {tensors.device.type}")
        if not tensors.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        return self._native.on_host(tensors.detach())

    def _run(self, name: str, *arguments):
        work = getattr(self._gloo, name)(*arguments)
        done = _Done(work)
        done.wait()
        return done

    def allreduce(self, tensors, opts=None):
        return self._run("allreduce", self._host(tensors), opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors, opts=None):
        for tensor in tensors:
            self.allreduce([tensor], opts and _plain(c10d.AllreduceOptions(), opts))
        return _Done(None)

    def broadcast(self, tensors, opts=None):
        return self._run("broadcast", self._host(tensors), opts or c10d.BroadcastOptions())

    def reduce(self, tensors, opts=None):
        return self._run("reduce", self._host(tensors), opts or c10d.ReduceOptions())

    def allgather(self, outputs, inputs, opts=None):
        return self._run("allgather", self._host(outputs), self._host(inputs), opts or c10d.AllgatherOptions())

    def all_gather_single(self, output, given, opts=None):
        host = self._host(output)
        pieces = list(host.view(-1).chunk(self.size()))
        return self._run("allgather", [pieces], [self._host(given).view(-1)], c10d.AllgatherOptions())

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for output, given in zip(outputs, inputs):
            self.all_gather_single(output, given)
        return _Done(None)

    def reduce_scatter(self, outputs, inputs, opts=None):
        for output, pieces in zip(outputs, inputs):
            self.reduce_scatter_single(output, torch.cat([piece.reshape(-1) for piece in pieces]), opts)
        return _Done(None)

    def reduce_scatter_single(self, output, given, opts=None):
        whole = self._host(given).reshape(-1).clone()
        self._run("allreduce", [whole], _plain(c10d.AllreduceOptions(), opts))
        mine = whole.chunk(self.size())[self.rank()]
        self._host(output).view(-1).copy_(mine)
        return _Done(None)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        for output, given in zip(outputs, inputs):
            self.reduce_scatter_single(output, given, opts)
        return _Done(None)

    def all_to_all_single(self, output, given, output_sizes, input_sizes, opts=None):
        return self._run("alltoall_base", self._host(output), self._host(given), output_sizes, input_sizes)

    def barrier(self, opts=None):
        return self._run("barrier", c10d.BarrierOptions())


def _plain(options, given):
    """`options` with the reduction of the given ones."""
    if given is not None:
        options.reduceOp = given.reduceOp
    return options


def install() -> None:
    """Make this process one of a host with a simulated accelerator; before anything asks DeepSpeed for its own."""
    load()
    set_accelerator(SimAccelerator())
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, SimProcessGroup, devices=[NAME])
