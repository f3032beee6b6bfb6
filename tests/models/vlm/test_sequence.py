"""A batch over several ranks: losses and gradients as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import run_ranks
from tiny_models import checkpoint_of

KINDS = ("qwen2", "qwen2_5_vl", "qwen3_vl", "internvl")
FULL = "qwen2_5_vl"  # tried with a critic and under ZeRO too


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("models")
    folders = {kind: checkpoint_of(root, kind).path for kind in KINDS}
    out = root / "out.json"
    run_ranks("sequence_ranks.py", json.dumps(folders), FULL, str(out), ranks=4, folder=Path(__file__).parent)
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_one_rank(differences, kind):
    assert len(differences[kind]) == 4 + (2 + 2 + 9 + 2) * (kind == FULL)
    assert max(differences[kind].values()) <= 1e-5, differences[kind]
