"""Seeds that depend on what is drawn, not on who draws it."""

import hashlib
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """A 63-bit seed from the run's seed and any parts (policy step, global sample index, a purpose such as 'eval').

    The same on every rank and process: built on SHA-256, not on Python's salted `hash`.
    """
    text = "/".join(str(part) for part in (run_seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike; model initialisation then agrees on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def choose_deterministic() -> None:
    """Let PyTorch, cuBLAS and FlashAttention take operations that give the same bits each time; PyTorch warns of those
    of its own that have none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as PyTorch's notes on reproducibility ask
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # has no such backward, and says nothing


def kernel_modes() -> tuple[int, bool]:
    """What `choose_deterministic` changes in PyTorch, for `set_kernel_modes`."""
    return torch.get_deterministic_debug_mode(), torch.backends.cuda.cudnn_sdp_enabled()


def set_kernel_modes(modes: tuple[int, bool]) -> None:
    """As they were."""
    torch.set_deterministic_debug_mode(modes[0])
    torch.backends.cuda.enable_cudnn_sdp(modes[1])


@contextmanager
def strict_if_deterministic(chosen: bool) -> Iterator[None]:
    """Inside, an operation without such a kernel is an error; only then PyTorch's attention takes the backward that has
    one. chosen: nothing changes where not."""
    if chosen:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if chosen:
            torch.use_deterministic_algorithms(True, warn_only=True)


LEAST = 0.1  # share of its learning rate that cosine_with_min_lr ends at


def _share_of_rate(step: int, name: str, warmup: int, total: int) -> float:
    """The factor on the learning rate before optimizer step number `step` (from 0): linear to 1 over `warmup` steps,
    then by the schedule's name until `total`, behind which it stays."""
    if step < warmup:
        return float(step) / float(max(1, warmup))
    if name == "constant_with_warmup":
        return 1.0
    if name == "linear":
        return max(0.0, float(total - step) / float(max(1, total - warmup)))
    progress = min(1.0, float(step - warmup) / float(max(1, total - warmup)))
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return share * (1 - LEAST) + LEAST if name == "cosine_with_min_lr" else share


def rate_schedule(name: str, optimizer: Optimizer, warmup: int, total: int) -> LambdaLR:
    """The schedule that sets an optimizer's learning rates.

    Args:
        name: constant_with_warmup, linear, cosine or cosine_with_min_lr.
        optimizer: whose rates are those after warm-up.
        warmup: optimizer steps in which the rates rise linearly from 0.
        total: optimizer steps of the run, warm-up included.
    """
    return LambdaLR(optimizer, partial(_share_of_rate, name=name, warmup=warmup, total=total))
