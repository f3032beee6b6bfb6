"""What every run takes, whatever the model: the program itself, the driver, and what allocators leave unused."""

import os

import torch

from ...config.placement import DEVICES, GIB, Device, of_product
from ...observe.environment import device_products
from ...rollout.vllm.arguments import HOST_CACHE
from .table import HOST, Item
from .times import products_a_thread

PROGRAM, PROGRAM_ENGINE = 1.0 * GIB, 3.0 * GIB  # Python with torch, transformers, DeepSpeed; and with an engine, CUDA
DRIVER = 1.25 * GIB  # context, loaded kernels, NCCL's buffers
FRAGMENTS = 0.02  # of a device's memory
CPU_BANDWIDTH = 10e9  # bytes a second of a host's memory


def program(device: Device, engine: bool) -> list[Item]:
    """The process on the host, its context on the device, and what the allocator there cannot use. engine: whether one
    with its own weights runs in it."""
    items = [Item("Python and its libraries", PROGRAM_ENGINE if engine and not device.on_cpu else PROGRAM, where=HOST)]
    if not device.on_cpu:
        items += [Item("driver and NCCL", DRIVER), Item("left unused by the allocator", FRAGMENTS * device.memory)]
    return items


def host_engine(weights: float, cache: float) -> list[Item]:
    """vLLM on the CPU: weights, packed for its products, and its cache, which is all in memory from the start.

    cache: bytes of keys and values, unless the environment says otherwise.
    """
    given = os.environ.get(HOST_CACHE)
    cache = cache if given is None else float(given) * GIB
    return [Item("vLLM: weights", weights), Item("vLLM: KV cache and work space", cache + 0.08 * GIB)]


def host_memory() -> float:
    """Bytes of host memory that this process may use: the machine's, or its control group's."""
    import psutil

    limits = [float(psutil.virtual_memory().total)]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.isfile(name):
            with open(name) as file:
                text = file.read().strip()
            if text.isdigit():
                limits.append(float(text))
    return min(limits)


def accelerators() -> int:
    """Those of this host; 0 without any."""
    from deepspeed.accelerator import get_accelerator

    return 0 if get_accelerator().device_name() == "cpu" else get_accelerator().device_count()


def cpu(local: int) -> Device:
    """This host without an accelerator, shared by `local` ranks. Its products are measured, once in a process."""
    memory = host_memory() / local
    threads = min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // local))
    return Device("cpu", memory, memory, threads * products_a_thread(), CPU_BANDWIDTH, CPU_BANDWIDTH, ranks=1)


def present(local: int) -> Device:
    """The accelerator of this process, or the CPU.

    Speeds are those of the named device that is most like it: of its name, else of its memory.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    host = cpu(local)
    memory = 0 if accelerator.device_name() == "cpu" else float(accelerator.total_memory())
    if memory <= 0:
        return host
    named = of_product((device_products() or [""])[0])
    like = min(named or DEVICES.values(), key=lambda device: abs(device.memory - memory))
    name = like.name if named else accelerator.device_name()
    return Device(name, memory, host.host, like.flops, like.bandwidth, like.link, local)
