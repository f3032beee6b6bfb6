"""A batch over several ranks: losses and gradients as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import run_ranks
from tiny_models import checkpoint_of, load

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.vlm.actor import Actor
from lightrft_visual.runtime.sequence import SequenceGroup

KINDS = ("qwen2", "qwen2_5_vl", "qwen3_vl", "internvl")
FULL = "qwen2_5_vl"  # tried with a critic and under ZeRO too


@pytest.fixture(scope="module")
def differences(root) -> dict[str, dict[str, float]]:
    folders = {kind: checkpoint_of(root, kind).path for kind in KINDS}
    out = root / "out.json"
    run_ranks("sequence_ranks.py", json.dumps(folders), FULL, str(out), ranks=4, folder=Path(__file__).parent)
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_one_rank(differences, kind):
    assert len(differences[kind]) == 2 + (2 + 2 + 5 + 2) * (kind == FULL)
    assert max(differences[kind].values()) <= 1e-5, differences[kind]


@pytest.mark.parametrize(
    "kind,size,attention,text",
    [
        ("qwen2", 3, "sdpa", "sp_size 3 does not divide the model's 4 attention heads"),
        ("qwen2", 2, "eager", "sp_size is not proven for model type 'qwen2' with attention eager"),
        ("janus", 2, "sdpa", "the halves of guided images"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(root, kind, size, attention, text):
    checkpoint = checkpoint_of(root, kind)
    model = load(checkpoint.path, checkpoint.vision)
    model.set_attn_implementation(attention)
    with pytest.raises(ConfigError, match=text):
        Actor(model, [], [], sequence=SequenceGroup(size, 0, None, None))


def test_ranks_divide_into_groups():
    assert SequenceGroup.of(1) is None
    with pytest.raises(ConfigError, match="sp_size 2 does not divide 1 ranks"):
        SequenceGroup.of(2)
