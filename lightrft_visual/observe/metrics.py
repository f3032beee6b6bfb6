"""Metrics of one step: sums over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..runtime.collectives import all_gather_object, all_reduce_sum

Number = float | int | torch.Tensor
COUNTED = ("/failures", "/not_applicable")  # ends of names of counts of samples, which add up over ranks
SPENT = "/time"  # of seconds, which ranks spend at once


def as_double(value: Number) -> torch.Tensor:
    """A detached float64 scalar on its own device, so that adding up micro-batches never waits for the device."""
    return torch.as_tensor(value).detach().double()


@dataclass
class Moments:
    """Count, mean and sum of squared deviations; `merge` is exact for any split (Chan, Golub, LeVeque 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, other: Moments) -> Moments:
        """The moments of both together (Chan et al. 1979, pairwise update)."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        squares = self.squares + other.squares + delta * delta * self.count * other.count / count
        return Moments(count, mean, squares)

    @classmethod
    def of(cls, values: torch.Tensor) -> Moments:
        """Moments of all elements; NaN stays NaN."""
        if values.numel() == 0:
            return cls()
        values = values.detach().double()
        mean = values.mean()
        return cls(float(values.numel()), mean.item(), (values - mean).square().sum().item())

    @classmethod
    def over_ranks(cls, values: torch.Tensor) -> Moments:
        """Moments of all ranks' elements, the same on every rank. A collective, also for a rank without any."""
        values = values.detach().double()
        count, total = all_reduce_sum(torch.stack([values.new_tensor(values.numel()), values.sum()])).tolist()
        mean = total / max(count, 1.0)
        return cls(count, mean, all_reduce_sum((values - mean).square().sum()).item())

    @property
    def sample_variance(self) -> float:
        """Variance with n - 1; 0 for fewer than two elements."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


def larger(left: float, right: float) -> float:
    """max() that keeps NaN wherever it stands."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


class MetricsAccumulator:
    """Collects one step's metrics over micro-batches; `reduce` gives the same dict on every rank.

    Ratios are kept as numerator and denominator, so that a mean over tokens stays a mean over all tokens however they
    are cut into micro-batches and ranks. A name that only some ranks have seen is reduced over those. A ratio whose
    denominator is 0 (nothing was counted) is left out of the result rather than reported as 0.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, list[torch.Tensor]] = {}
        self._moments: dict[str, Moments] = {}

    def add(self, name: str, numerator: Number, denominator: Number = 1.0) -> None:
        """Add one part of a ratio. Without a denominator: one observation of a mean."""
        old_numerator, old_denominator = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (as_double(numerator) + old_numerator, as_double(denominator) + old_denominator)

    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add a tensor's elements, or those where `mask` (same shape) is true, to a mean over all elements."""
        weights = torch.ones_like(values) if mask is None else mask.to(values.device)
        kept = torch.where(weights.bool(), values.detach(), torch.zeros_like(values)).double()
        self.add(name, kept.sum(), weights.bool().sum())

    def add_total(self, name: str, value: Number) -> None:
        """Add to a sum over micro-batches and ranks, such as a count of tokens."""
        self._totals[name] = as_double(value) + self._totals.get(name, 0.0)

    def add_max(self, name: str, value: Number) -> None:
        """Keep the largest over micro-batches and ranks; NaN wins over every number."""
        self._maxima.setdefault(name, []).append(as_double(value))

    def add_moments(self, name: str, values: torch.Tensor) -> None:
        """Report `<name>_mean` and `<name>_std` (population) over the elements of all micro-batches and ranks."""
        self._moments[name] = self._moments.get(name, Moments()).merge(Moments.of(values))

    def add_numbers(self, found: Mapping[str, float]) -> None:
        """Add plain numbers of this rank: counts are summed over ranks, anything else is averaged."""
        for name, value in found.items():
            if name.endswith(COUNTED):
                self.add_total(name, value)
            else:
                self.add(name, value)

    def reduce(self) -> dict[str, float]:
        """Combine all ranks (a collective: every rank calls it) and start afresh."""
        mine = self._host_values()
        self.__init__()
        ranks = all_gather_object(mine)
        result: dict[str, float] = {}
        for name in ordered_names(ranks, "sums"):
            parts = [values["sums"][name] for values in ranks if name in values["sums"]]
            denominator = math.fsum(part[1] for part in parts)
            if denominator != 0:
                result[name] = sum(part[0] for part in parts) / denominator
        for name in ordered_names(ranks, "totals"):
            result[name] = sum(values["totals"].get(name, 0.0) for values in ranks)
        for name in ordered_names(ranks, "maxima"):
            result[name] = reduce_with(larger, [values["maxima"][name] for values in ranks if name in values["maxima"]])
        for name in ordered_names(ranks, "moments"):
            moments = reduce_with(Moments.merge, [v["moments"][name] for v in ranks if name in v["moments"]])
            if moments.count:
                result[f"{name}_mean"], result[f"{name}_std"] = moments.mean, moments.std
        return result

    def _host_values(self) -> dict[str, dict]:
        return {
            "sums": {name: (top.item(), bottom.item()) for name, (top, bottom) in self._sums.items()},
            "totals": {name: value.item() for name, value in self._totals.items()},
            "maxima": {name: reduce_with(larger, [v.item() for v in vs]) for name, vs in self._maxima.items()},
            "moments": dict(self._moments),
        }


def ordered_names(ranks: list[dict[str, dict]], kind: str) -> list[str]:
    """Names that any rank has, in order of first appearance: the same list on every rank."""
    return list(dict.fromkeys(name for values in ranks for name in values[kind]))


def reduce_with(combine: Callable, values: list):
    """The values combined from the left; at least one is needed."""
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result
