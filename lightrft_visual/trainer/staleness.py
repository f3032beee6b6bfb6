"""How old what is trained on is, in policy versions."""

from __future__ import annotations

import torch

from ..observe.metrics import MetricsAccumulator

T = torch.Tensor


def add_ages(metrics: MetricsAccumulator, ages: T, mask: T, most: int) -> None:
    """`staleness_mean`, `staleness_max`, and `staleness_0` to `staleness_<most>`, the share of each age under the mask;
    the last one holds those that are older too. ages: versions between the policy that drew and the present one."""
    ages = ages.clamp(min=0)
    metrics.add_mean("staleness_mean", ages.float(), mask)
    if mask.any():
        metrics.add_max("staleness_max", float(ages[mask].max()))
    for age in range(most + 1):
        of_age = ages == age if age < most else ages >= age
        metrics.add_mean(f"staleness_{age}", of_age.float(), mask)
