"""What this machine has, and what is missing for what."""

import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .. import __version__
from ..runtime.host_memory import nvidia_devices
from ..runtime.packages import OPTIONAL, installed_version, unseen_devices, wrong_torchvision

NEEDED = ("torch", "torchvision", "transformers", "deepspeed", "diffusers", "peft", "accelerate", "datasets")
PROGRAMS = (
    ("tesseract", "the scorer ocr", "apt-get install tesseract-ocr"),
    ("c++", "what torch.compile, vLLM and Triton build", "apt-get install g++"),
)


def told() -> Iterator[str]:
    """Lines for people; `missing` begins those that ask for something."""
    yield f"lightrft_visual {__version__}, Python {platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        yield "missing  a supported Python: 3.11 to 3.13"
    for name in NEEDED:
        found = installed_version(name)
        yield f"ok       {name} {found}" if found else f"missing  {name}: bash scripts/setup.sh, or pip install {name}"
    for name, (purpose, how) in OPTIONAL.items():
        found = installed_version(name) or ("of another distribution" if find_spec(name) else None)
        yield f"ok       {name} {found}" if found else f"without  {name}, for {purpose}: {how}"
    for name, purpose, how in PROGRAMS:
        found = shutil.which(name)
        yield f"ok       {found}" if found else f"without  {name}, for {purpose}: {how}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if nvidia_devices():
        how = f"apt-get install python3.{sys.version_info.minor}-dev"
        yield f"ok       {header}" if header.is_file() else f"without  {header}, for Triton's first kernel: {how}"
    yield from _devices()


def _devices() -> Iterator[str]:
    try:
        import torch
    except ImportError:
        return
    for told in filter(None, (wrong_torchvision(), unseen_devices())):
        yield f"missing  {told}"
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
        yield f"device   CPU, {torch.get_num_threads()} threads; no CUDA device (torch is {built})"
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"device   {found.name}, {found.total_memory / 2**30:.0f} GiB"
