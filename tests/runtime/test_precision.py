"""What models keep in fp32 stays so beside weights that train in bf16, and what is said where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launched import run_ranks
from torch import nn

from lightrft_visual.runtime.precision import named_for_fp32

KEPT = ("0", "1", "1_fp32", "2", "2_host")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("precision")
    run_ranks("precision_ranks.py", str(folder), folder=Path(__file__).parent)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", KEPT)
def test_a_named_part_trains_in_fp32(results, case):
    for rank in results:
        types = rank[case]["types"]
        assert types["norm.weight"] == types["norm.bias"] == types["gain"] == "torch.float32"
        assert types["body.weight"] == types["head.weight"] == "torch.bfloat16"
        assert rank[case]["norm"] != torch.tensor(rank[case]["norm"]).bfloat16().tolist()
        assert rank[case]["norm"] == pytest.approx(rank["plain"], abs=2e-4)  # gradients travel in bf16
        assert rank[case]["said"] == []
    assert results[0][case]["norm"] == results[1][case]["norm"]


def test_zero_3_trains_it_in_bf16_and_says_so_once(results):
    types = results[0]["3"]["types"]
    assert types["norm.weight"] == "torch.bfloat16" and types["gain"] == "torch.float32"
    told = "2 weights that the model keeps in fp32 (norm.weight, norm.bias) compute in bfloat16 while they are trained"
    assert [line.startswith(told) for line in results[0]["3"]["said"]] == [True] and results[1]["3"]["said"] == []


@pytest.mark.parametrize("case", [*KEPT, "3"])
def test_frozen_values_are_whole_and_a_resumed_step_is_the_same(results, case):
    for rank in results:
        assert rank[case]["gain"] == [1 + 2**-12] * 8
        assert rank[case]["again"] == rank[case]["norm"]


@pytest.mark.parametrize("case", [*KEPT, "3"])
def test_a_checkpoint_has_what_trains_and_no_more(results, case):
    trained = ["body.bias", "body.weight", "head.bias", "head.weight", "norm.bias", "norm.weight"]
    assert results[0][case]["saved"] == trained


@pytest.mark.parametrize("stage", ("2", "3"))
def test_a_frozen_copy_has_the_same_types(results, stage):
    types = results[0]["frozen"][stage]
    assert types["norm.weight"] == types["gain"] == "torch.float32" and types["body.weight"] == "torch.bfloat16"


def test_names_are_whole_parts_of_paths():
    class Experts(nn.Module):
        _keep_in_fp32_modules_strict = ["gate.weight"]

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.gate_up = nn.Linear(2, 2), nn.Linear(2, 2)

    model = nn.ModuleDict({"language_model": Experts(), "tower": nn.Linear(2, 2)})
    assert list(named_for_fp32(model)) == ["language_model.gate.weight"]
    assert list(named_for_fp32(Experts())) == ["gate.weight"]


def test_gradients_of_many_micro_batches_add_up_in_fp32(results):
    for rank in results:
        errors = rank["accumulated"]
        assert max(errors[name] for name in ("2", "2_host", "3")) < 1e-3 < 3e-3 < errors["2_bf16"], errors
