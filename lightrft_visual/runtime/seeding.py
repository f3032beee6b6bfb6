"""Seeds that depend on what is drawn, not on who draws it."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


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
