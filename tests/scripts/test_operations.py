"""What the count of operations counts: kernels, not views, and what an operation is made of once."""

import runpy
from pathlib import Path

import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "operations.py"


def test_operations_are_kernels_and_no_views():
    operations = runpy.run_path(str(BENCH))["operations"]
    left, right, weight = torch.randn(3, 5), torch.randn(5, 7), torch.randn(7, 5)

    def step() -> None:
        torch.relu((left @ right).t().reshape(7, 3)[1:].add(1.0))  # product, sum, relu
        torch.nn.functional.linear(left, weight)  # one product more

    assert operations(step) == 4
