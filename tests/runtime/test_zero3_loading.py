"""ZeRO-3 divides models while they load: the same weights, and no rank ever holds a whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_families
import torch
from launched import run_ranks
from tiny_models import checkpoint_of

RANKS = 2
# Name of a model, and whether it is loaded in bfloat16.
MODELS = [
    ("qwen2_5_vl", False),
    ("qwen3_vl", True),
    ("qwen2+tied", False),
    ("janus", False),
    ("sd15", False),
    ("wan_two_experts", True),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("models")
    given = []
    for name, bf16 in MODELS:
        if hasattr(tiny_families, name):
            torch.manual_seed(0)
            getattr(tiny_families, name)().save_pretrained(root / name)
            given.append((name, str(root / name), bf16))
        else:
            given.append((name, checkpoint_of(root, name).path, bf16))
    run_ranks("zero3_loading_ranks.py", json.dumps(given), str(root), ranks=RANKS, folder=Path(__file__).parent)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", [name for name, _ in MODELS])
def test_a_divided_model_has_the_weights_and_buffers_of_a_whole_one(results, name):
    assert all(rank[name]["different"] == [] for rank in results)


@pytest.mark.parametrize("name", [name for name, _ in MODELS])
def test_a_rank_holds_its_part_and_one_module_at_a_time(results, name):
    for rank in results:
        held = rank[name]
        # A tied head is made before it is tied.
        made = held["total"] + (held["module"] if name.endswith("+tied") else 0)
        assert 0 < held["peak"] <= made / RANKS + held["module"] + 4 * RANKS < held["total"]  # parts of equal size
