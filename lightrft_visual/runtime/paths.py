"""Folders that a run uses outside its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """LIGHTRFT_CACHE, else the user's cache folder."""
    base = os.environ.get("LIGHTRFT_CACHE")
    return Path(base) if base else Path.home() / ".cache" / "lightrft_visual"
