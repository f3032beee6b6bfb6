"""A batch with images takes little more host memory than one copy of them, from rollouts to micro-batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location(
    "host_memory", Path(__file__).resolve().parents[2] / "scripts" / "bench" / "host_memory.py"
)
host_memory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(host_memory)


def test_a_batch_holds_its_images_once() -> None:
    prompts = host_memory.prompts_of(128, patches=60, length=16)
    images = 128 * 60 * host_memory.PATCH_WIDTH * 4
    held, _ = host_memory.through_the_stages(prompts, samples=4, tokens=8)
    assert images < held <= host_memory.LIMIT * images


def test_a_second_copy_would_be_seen() -> None:
    first, second = (host_memory.prompts_of(2, patches=20, length=4) for _ in range(2))
    assert sum(host_memory.storages([first, second]).values()) == 2 * sum(host_memory.storages([first, first]).values())
