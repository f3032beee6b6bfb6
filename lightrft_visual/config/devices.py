"""Accelerators by name, as far as a plan needs them: memory and rough speeds. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
PRESENT = "present"


@dataclass(frozen=True)
class Device:
    """One accelerator and its share of the host.

    memory: bytes that a process can allocate, the driver's own share taken off; host: bytes of host memory for each
    accelerator of a usual host; flops: of dense bfloat16 products a second; bandwidth: of its memory, link: to the
    host, each in bytes a second; ranks: accelerators of a usual host. On the CPU device memory and host memory are one.
    """

    name: str
    memory: float
    host: float
    flops: float
    bandwidth: float
    link: float
    ranks: int = 8

    @property
    def on_cpu(self) -> bool:
        """Whether the models lie in host memory."""
        return self.name == "cpu"


def _card(name: str, memory: float, host: int, tflops: float, bandwidth: int, link: int, ranks: int = 8) -> Device:
    return Device(name, memory * GIB, host * GIB, tflops * 1e12, bandwidth * 1e9, link * 1e9, ranks)


# Memory as the driver reports it. Products, memory and link of the vendors' data sheets; hosts as clouds rent them.
DEVICES = {
    device.name: device
    for device in (
        _card("a10-24gb", 22.0, 48, 125, 600, 25, 4),
        _card("a100-40gb", 39.4, 120, 312, 1555, 25),
        _card("a100-80gb", 79.1, 120, 312, 2039, 25),
        _card("b200-180gb", 178.0, 240, 2250, 8000, 50),
        _card("h100-80gb", 79.1, 240, 989, 3350, 50),
        _card("h200-141gb", 139.8, 240, 989, 4800, 50),
        _card("h20-96gb", 95.0, 240, 148, 4000, 50),
        _card("l4-24gb", 22.0, 48, 121, 300, 25),
        _card("l40s-48gb", 44.4, 96, 362, 864, 25),
        _card("rtx4090-24gb", 23.5, 64, 165, 1008, 25, 1),
        _card("rtx5090-32gb", 31.3, 64, 209, 1792, 50, 1),
    )
}
NAMES = (PRESENT, "cpu", *DEVICES)
