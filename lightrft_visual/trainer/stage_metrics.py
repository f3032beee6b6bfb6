"""What the stages say in plain numbers, put together over rounds of sampling and over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..observe.metrics import MetricsAccumulator

COUNTED = ("/failures", "/not_applicable")  # of samples: they add up
SPENT = "/time"  # seconds: they add up over rounds, ranks spend them at once


def over_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Numbers of a step of those of its rounds of sampling, which are all of one size: counts and seconds are summed,
    shares averaged."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in rounds for name in each):
        values = [each[name] for each in rounds if name in each]
        found[name] = sum(values) / (1 if name.endswith((*COUNTED, SPENT)) else len(values))
    return found


def add_stage_metrics(metrics: MetricsAccumulator, found: Mapping[str, float]) -> None:
    """Add the stages' numbers of this rank: counts are summed over ranks, anything else is averaged."""
    for name, value in found.items():
        if name.endswith(COUNTED):
            metrics.add_total(name, value)
        else:
            metrics.add(name, value)
