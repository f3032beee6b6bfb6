"""Two ways in which numbers of a run tell of over-optimisation: leaving a learnt band, and parting from the reward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

RISEN = 3.0  # standard deviations by which a running mean has risen for certain
EARLY = 2.0  # times the bounds, around the first value, while a band is learnt
SMOOTHING = 0.3  # weight of a new value in the running means that are compared


@dataclass(frozen=True)
class Bounds:
    """How wide the band of a number is around the median m of its first values, whose standard deviation is s.

    low, high: which sides count. share: the band reaches at least share |m| to each side; floor: and at least this far;
    it reaches `width` s where that is more. soft: learning itself moves the number (entropy falls, answers agree), so
    leaving counts only while gold, or where there is none the reward, has not risen.
    """

    share: float = 0.5
    floor: float = 0.0
    low: bool = True
    high: bool = True
    soft: bool = False


@dataclass
class Band:
    """Learns from the first `learn` values, then says of each whether it lies outside. `learn` is at least 1.

    The first value is the base's own. Already while the band is learnt, a value twice as far from it as the bounds
    alone allow lies outside, and is not learnt from: what a hack of a few steps does must not pass for usual.
    """

    bounds: Bounds
    learn: int
    width: float
    values: list[float] = field(default_factory=list)
    outside: int = 0  # values in a row

    def limits(self) -> tuple[float, float] | None:
        """(low, high); None before the first value."""
        if not self.values:
            return None
        learnt = len(self.values) >= self.learn
        middle = statistics.median(self.values) if learnt else self.values[0]
        reach = max(self.bounds.share * abs(middle), self.bounds.floor)
        reach = max(self.width * self.deviation(), reach) if learnt else EARLY * reach
        low = middle - reach if self.bounds.low else float("-inf")
        return low, (middle + reach if self.bounds.high else float("inf"))

    def deviation(self) -> float:
        """Standard deviation of the values learnt from around their trend, from differences of neighbours: a number
        that begins to run away at once must not teach the band that this is usual."""
        moved = [two - one for one, two in zip(self.values, self.values[1:])]
        return math.sqrt(statistics.fmean(each * each for each in moved) / 2) if moved else 0.0

    def see(self, value: float) -> int:
        """How many values in a row lie outside, this one included."""
        limits = self.limits()
        inside = limits is None or limits[0] <= value <= limits[1]
        if inside and len(self.values) < self.learn:
            self.values.append(value)
        self.outside = 0 if inside else self.outside + 1
        return self.outside


@dataclass
class Parting:
    """Whether gold falls while the reward does not: both as running means, against gold's best so far.

    learn: values before anything is said. width: how many standard deviations of its running mean gold must have lost.
    smoothing 1 compares the values themselves.
    """

    learn: int
    width: float
    smoothing: float = SMOOTHING
    seen: int = 0
    reward: float = 0.0
    gold: float = 0.0
    last: tuple[float, float] = (0.0, 0.0)
    changes: tuple[float, float] = (0.0, 0.0)  # sums of squared differences of neighbouring values: reward, gold
    start: float = 0.0  # gold's running mean at the end of the values learnt from
    best_gold: float = float("-inf")
    best_reward: float = 0.0  # the reward's running mean where gold was best
    best_step: int = 0
    apart: int = 0  # values in a row

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Parting:
        """From a checkpoint's values; what earlier versions kept beside them has no use any more."""
        pairs, known = ("last", "changes"), {each.name for each in fields(cls)}
        return cls(**{key: tuple(value) if key in pairs else value for key, value in kept.items() if key in known})

    def noise(self, which: int) -> float:
        """Standard deviation of the running mean of the reward (0) or of gold (1) around its trend, from differences of
        neighbouring values: a trend hardly enters these."""
        if self.seen < 2:
            return 0.0
        single = (self.changes[which] / (self.seen - 1) / 2) ** 0.5
        return single * (self.smoothing / (2 - self.smoothing)) ** 0.5

    def risen(self) -> bool:
        """Whether gold's running mean is above its start for certain."""
        return self.gold - self.start > RISEN * self.noise(1)

    def see(self, step: int, reward: float, gold: float) -> int:
        """How many values in a row stand apart, this one included."""
        if self.seen:
            moved = reward - self.last[0], gold - self.last[1]
            self.changes = self.changes[0] + moved[0] ** 2, self.changes[1] + moved[1] ** 2
            self.reward += self.smoothing * (reward - self.reward)
            self.gold += self.smoothing * (gold - self.gold)
        else:
            self.reward, self.gold = reward, gold
        self.last, self.seen = (reward, gold), self.seen + 1
        if self.seen <= max(1, self.learn):
            self.start = self.gold
        if self.gold > self.best_gold:
            self.best_gold, self.best_reward, self.best_step = self.gold, self.reward, step
        lost = self.best_gold - self.gold > max(self.width * self.noise(1), 1e-9)
        risen = self.reward > self.best_reward - 2 * self.noise(0)
        self.apart = self.apart + 1 if lost and risen and self.seen > self.learn else 0
        return self.apart
