"""A batch with images takes little more host memory than one copy of them, from rollouts to micro-batches."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location(
    "bench_memory", Path(__file__).resolve().parents[2] / "scripts" / "bench" / "memory.py"
)
host_memory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(host_memory)


def test_a_batch_holds_its_images_once() -> None:
    prompts = host_memory.prompts_of(128, patches=80, length=24)
    images = 128 * 80 * host_memory.PATCH_WIDTH * 4
    held = host_memory.through_the_stages(prompts, samples=4, tokens=8, peaks=host_memory.Peaks())
    assert images < held <= host_memory.LIMIT * images


def test_a_second_copy_would_be_seen() -> None:
    first, second = (host_memory.prompts_of(2, patches=40, length=12) for _ in range(2))
    assert sum(host_memory.storages([first, second]).values()) == 2 * sum(host_memory.storages([first, first]).values())
