"""Shared by all tests: a cache for embedded models, so that they are built once and never in the user's own cache."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def cache_root(tmp_path_factory) -> Path:
    """Folder of embedded data and models for this session; also set for child processes."""
    root = Path(os.environ.get("LIGHTRFT_CACHE") or tmp_path_factory.mktemp("lightrft_cache"))
    os.environ["LIGHTRFT_CACHE"] = str(root)
    return root
