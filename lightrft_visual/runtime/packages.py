"""Packages that only some runs need: what for, and the line that installs them; and what is of this one."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..errors import ConfigError
from .host_memory import nvidia_devices

# Package: what it is for, how to get it.
OPTIONAL = {
    "vllm": ("rollouts of vision-language models by vLLM", "pip install 'lightrft_visual[vllm]' (or --engine_type hf)"),
    "sglang": ("rollouts by --engine_type sglang, on CUDA", "pip install 'lightrft_visual[sglang]'"),
    "liger_kernel": ("--use_liger_kernel", "pip install 'lightrft_visual[liger]'"),
    "ray": ("rollouts and rewards in workers (--placement split)", "pip install 'lightrft_visual[ray]'"),
    "wandb": ("--use_wandb", "pip install 'lightrft_visual[wandb]'"),
    "tensorboard": ("--use_tensorboard", "pip install tensorboard"),
    "bokeh": ("report.html", "pip install bokeh"),
    "fastapi": ("serve-reward", "pip install fastapi uvicorn"),
    "imageio": ("videos that are drawn", "pip install 'imageio[ffmpeg]'"),
    "num2words": ("the processor of SmolVLM", "pip install num2words"),
    "rapidocr": ("the scorer ocr", "pip install 'lightrft_visual[diffusion-rewards]'"),
    "mathruler": ("the scorer geometry3k", "pip install mathruler pylatexenc"),
    "scipy": ("the detector of the scorer geneval", "pip install 'lightrft_visual[diffusion-rewards]'"),
    "pytesseract": ("the scorer ocr by Tesseract", "pip install 'lightrft_visual[diffusion-rewards]'"),
}


def installed_version(package: str) -> str | None:
    """The version of an installed package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def wrong_torchvision() -> str | None:
    """Why torchvision cannot be imported beside this torch, and what to install; None where it can."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        torch, own = installed_version("torch") or "", installed_version("torchvision")
        told = (
            f"torchvision {own} does not work with torch {torch} ({type(error).__name__}: {str(error).splitlines()[0]})"
        )
        plain = f"pip install 'torch==={torch.partition('+')[0]}' takes the one without"
        return f"{told}: builds with +cpu and others do not mix, so install both from one index; {plain}"
    return None


def unseen_devices() -> str | None:
    """Why torch sees none of the host's NVIDIA devices, and what to do; None where it does, or is to see none."""
    import torch

    count, chosen = nvidia_devices(), os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    if not count or not re.match(r"\d|GPU-|MIG-", chosen) or torch.cuda.is_available():
        return None
    why = "is built for CPUs: install a build for CUDA"
    if built := torch.version.cuda:
        why = (
            f"is built for CUDA {built}: nvidia-smi says which CUDA the driver takes; where that is less, install a "
            "newer driver or the package cuda-compat"
        )
    return f"torch sees none of the {count} NVIDIA device(s) of this host, and the CPU is used. It {why}"


def missing(name: str) -> ConfigError:
    """The error for a package of OPTIONAL that is not there."""
    purpose, how = OPTIONAL[name]
    return ConfigError(f"{purpose}: this needs the package {name}, which is not installed: {how}")


@contextmanager
def needed(name: str) -> Iterator[None]:
    """Around imports of a package of OPTIONAL, or of one that comes with it: ConfigError where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(name) from error


def is_shipped(code: Any) -> bool:
    """Whether a class or function is of this package, and no user's."""
    return code.__module__.startswith(f"{__name__.partition('.')[0]}.")
