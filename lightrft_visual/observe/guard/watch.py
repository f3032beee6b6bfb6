"""The guard of a run: reads each step's and each evaluation's metrics, and says when one of them gives cause for alarm.

What it reads is the same on every rank, so all ranks come to the same answer.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...config.shared import GuardConfig
from ...runtime.collectives import all_gather_object
from .divergence import RISEN, DivergenceTest, PairedScores

BAND_WIDTH = 6.0  # standard deviations of the steps learnt from that a band reaches at least
EARLY = 2.0  # times the bounds, around the first value, while a band is learnt
SMOOTHING = 0.3  # weight of a new value in the running means that are compared


@dataclass(frozen=True)
class Bounds:
    """How wide the band of a number is around the median m of its first values, whose standard deviation is s.

    low, high: which sides count. share: the band reaches at least share |m| to each side; floor: and at least this far;
    it reaches BAND_WIDTH s where that is more. soft: learning itself moves the number (entropy falls, answers agree),
    so leaving counts only while gold, or where there is none the reward, has not risen.
    """

    share: float = 0.0
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
    values: list[float] = field(default_factory=list)
    outside: int = 0  # values in a row

    def limits(self) -> tuple[float, float] | None:
        """(low, high); None before the first value."""
        if not self.values:
            return None
        learnt = len(self.values) >= self.learn
        middle = statistics.median(self.values) if learnt else self.values[0]
        reach = max(self.bounds.share * abs(middle), self.bounds.floor)
        reach = max(BAND_WIDTH * self.deviation(), reach) if learnt else EARLY * reach
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
    last: Sequence[float] = (0.0, 0.0)
    changes: Sequence[float] = (0.0, 0.0)  # sums of squared differences of neighbouring values: reward, gold
    start: float = 0.0  # gold's running mean at the end of the values learnt from
    best_gold: float = float("-inf")
    best_reward: float = 0.0  # the reward's running mean where gold was best
    best_step: int = 0
    apart: int = 0  # values in a row

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
        """How many values in a row stand apart, this one included.

        Args:
            step: of the values.
            reward: mean of the step.
            gold: of the step, or what is compared in its place, such as a component of the reward.
        """
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


def repetition(tokens: Sequence[Hashable]) -> float:
    """Share of a response's pairs of neighbouring tokens that stood before in it; 0 for fewer than two pairs."""
    pairs = list(zip(tokens, tokens[1:]))
    return 1 - len(set(pairs)) / len(pairs) if len(pairs) > 1 else 0.0


def text_statistics(tokens: Sequence[Sequence[int]], groups: Sequence[int]) -> dict[str, float]:
    """Of the responses of all ranks: `repetition`, its mean; `identical_share`, the share of a group's responses that
    are its most common one; `common_answer`, the share of groups whose most common response is the same one. Two groups
    or more with two responses each are needed for the last two; they are left out otherwise. A collective.

    tokens: ids that were sampled, of each response of this rank; groups: numbers of each response's group.
    """
    by_group: dict[int, Counter] = defaultdict(Counter)
    for response, group in zip(tokens, groups):
        by_group[group][hash(tuple(response))] += 1  # hashes of numbers are alike in all processes
    own = [(*counts.most_common(1)[0], counts.total()) for counts in by_group.values()]
    parts = all_gather_object((sum(map(repetition, tokens)), len(tokens), own))
    number, tops = sum(count for _, count, _ in parts), [top for *_, each in parts for top in each]
    found = {"repetition": sum(repeated for repeated, *_ in parts) / number} if number else {}
    if len(tops) < 2 or all(total < 2 for *_, total in tops):
        return found
    most = Counter(response for response, *_ in tops).most_common(1)[0][1]
    shares = [count / total for _, count, total in tops]
    return found | {"identical_share": sum(shares) / len(shares), "common_answer": most / len(tops)}


# What is watched in each step, where a run has it.
STEP_BANDS: dict[str, Bounds] = {
    "response_length": Bounds(share=0.5, floor=1.0),
    "truncated_share": Bounds(floor=0.25, low=False),
    "repetition": Bounds(floor=0.15, low=False),
    "common_answer": Bounds(floor=0.3, low=False),
    "identical_share": Bounds(floor=0.3, low=False, soft=True),
    "entropy": Bounds(share=0.7, high=False, soft=True),
    "kl": Bounds(share=2.0, floor=0.5, low=False, soft=True),
    "image_diversity": Bounds(share=0.55, high=False),  # images that come to show the right thing lose a third
    "image_colours": Bounds(share=0.4),
    "image_edges": Bounds(share=0.6),
    "image_brightness": Bounds(share=0.2),
    "image_blank": Bounds(floor=0.1, low=False),
}
LEARN_STEPS = 5  # that bands are learnt from
DRIFT = 1.5  # times the base's own variety: how far images may be from the base's of the same noise
PARTING_WIDTH = 4.0  # standard deviations of a running mean whose best is a maximum over many steps


@dataclass(frozen=True)
class Alarm:
    """One signal that left its band, or a gold that parted from the reward; since: the step where they parted."""

    step: int
    signal: str
    value: float
    low: float | None
    high: float | None
    since: int
    text: str


Seen = tuple[str, Alarm | None]  # a signal that was read; what to tell where it is outside


class Guard:
    """Bands over the metrics of steps, gains of reward and gold, partings of reward components; best: (gold, step) of
    evaluations. paying: components that raise the reward by rising. learn_steps: steps that bands are learnt from.
    """

    def __init__(self, config: GuardConfig, learn_steps: int = LEARN_STEPS):
        self.config, self.learn_steps = config, learn_steps
        self.paying: Sequence[str] = ()
        self.bands: dict[str, Band] = {}
        self.partings: dict[str, Parting] = {}
        self.tests = {"gold": DivergenceTest(paired=False, base=learn_steps), "eval_gold": DivergenceTest(paired=True)}
        self.raised: set[str] = set()  # signals that are outside and have been told
        self.best: tuple[float, int] | None = None
        self.base_diversity = math.nan

    # -- what is read --------------------------------------------------------------------------------------------

    def after_step(self, step: int, metrics: Mapping[str, float], scores: PairedScores | None = None) -> list[Alarm]:
        """The alarms of a training step.

        Args:
            step: how many are finished.
            metrics: of the step, over all ranks; a value that is missing or not finite is not looked at.
            scores: reward and gold of its groups; None: gold did not score them.
        """
        reward = _finite(metrics, "reward_mean")
        if not self.config.watch or reward is None:
            return []
        compared = [] if scores is None else [self._compared(step, "gold", scores)]
        parts, bands = self._component_partings(step, reward, metrics), self._in_bands(step, reward, metrics)
        return self._told([*parts, *compared, *bands])

    def after_evaluation(
        self, step: int, metrics: Mapping[str, float], scores: PairedScores | None = None
    ) -> list[Alarm]:
        """The alarms of an evaluation; `best` follows `eval_gold`.

        Args:
            step: at which it was made.
            metrics: of the evaluation, over all ranks.
            scores: reward and gold of its prompts; None: gold did not score them.
        """
        gold = _finite(metrics, "eval_gold")
        if gold is not None and (self.best is None or gold > self.best[0]):
            self.best = (gold, step)
        if not self.config.watch:
            return []
        seen = [] if scores is None else [self._compared(step, "eval_gold", scores)]
        own, drift = _finite(metrics, "eval_image_diversity"), _finite(metrics, "eval_drift")
        if own is not None and math.isnan(self.base_diversity):
            self.base_diversity = own
        if drift is not None and not math.isnan(self.base_diversity):
            limits = 0.0, DRIFT * self.base_diversity
            seen.append(("eval_drift", _outside(step, "eval_drift", drift, limits) if drift > limits[1] else None))
        return self._told(seen)

    # -- signals -------------------------------------------------------------------------------------------------

    def _told(self, seen: Sequence[Seen]) -> list[Alarm]:
        """The alarms of signals that were inside before: each is told once each time that it goes outside."""
        new = [alarm for name, alarm in seen if alarm is not None and name not in self.raised]
        self.raised |= {name for name, alarm in seen if alarm is not None}
        self.raised -= {name for name, alarm in seen if alarm is None}
        return new

    def _compared(self, step: int, name: str, scores: PairedScores) -> Seen:
        """Gold of evaluations or of steps that parted from the reward."""
        divergence = self.tests[name].see(scores)
        if divergence is None:
            return name, None
        (old_reward, reward), (old_gold, gold) = divergence.reward, divergence.gold
        text = (
            f"{name} went from {old_gold:.3g} (step {divergence.start}) to {gold:.3g}, the reward from "
            f"{old_reward:.3g} to {reward:.3g}"
        )
        return name, Alarm(step, name, gold, old_gold, None, divergence.since, text)

    def _component_partings(self, step: int, reward: float, metrics: Mapping[str, float]) -> Iterator[Seen]:
        """A part of the reward that falls while the whole rises: another part pays for it. What does not pay may fall:
        penalties, and what a reward reports beside its score."""
        paying = [name for own in self.paying if (name := f"reward/{own}") in metrics]
        for name in paying if len(paying) > 1 else ():
            if (value := _finite(metrics, name)) is None:
                continue
            parting = self.partings.setdefault(name, Parting(self.learn_steps, PARTING_WIDTH))
            if parting.see(step, reward, value) < self.config.patience:
                yield name, None
                continue
            text = (
                f"{name} fell from {parting.best_gold:.3g} (step {parting.best_step}) to {parting.gold:.3g}, the "
                f"reward went from {parting.best_reward:.3g} to {parting.reward:.3g}"
            )
            yield name, Alarm(step, name, parting.gold, parting.best_gold, None, parting.best_step, text)

    def _in_bands(self, step: int, reward: float, metrics: Mapping[str, float]) -> Iterator[Seen]:
        """What is watched in each step, against what was learnt of it."""
        parting = self.partings.setdefault("reward_mean", Parting(self.learn_steps, PARTING_WIDTH))
        parting.see(step, reward, reward)
        tests = [each for each in self.tests.values() if each.compares]
        # gold, or without it the reward itself, for certain
        risen = any(each.risen() for each in tests) if tests else parting.risen()
        for name, bounds in STEP_BANDS.items():
            if (value := _finite(metrics, name)) is None:
                continue
            band = self.bands.setdefault(name, Band(bounds, self.learn_steps))
            outside = band.see(value) >= self.config.patience and not (bounds.soft and risen)
            limits = band.limits()
            yield name, _outside(step, name, value, limits) if outside and limits is not None else None

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Bands, partings and what has been told, for exact resume."""
        return {
            "bands": {name: {"values": band.values, "outside": band.outside} for name, band in self.bands.items()},
            "partings": {name: asdict(parting) for name, parting in self.partings.items()},
            "gains": {name: each.state_dict() for name, each in self.tests.items() if each.first or each.last},
            "raised": sorted(self.raised),
            "best": list(self.best) if self.best is not None else None,
            "base_diversity": self.base_diversity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s."""
        self.bands = {
            name: Band(STEP_BANDS[name], self.learn_steps, list(kept["values"]), int(kept["outside"]))
            for name, kept in state["bands"].items()
        }
        self.partings = {name: Parting(**kept) for name, kept in state["partings"].items()}
        for name, test in self.tests.items():
            test.load_state_dict(state["gains"].get(name, {"first": [], "last": []}))
        self.raised = set(state["raised"])
        self.best = (float(state["best"][0]), int(state["best"][1])) if state["best"] is not None else None
        self.base_diversity = float(state["base_diversity"])


def _outside(step: int, name: str, value: float, limits: tuple[float, float]) -> Alarm:
    """The alarm of a value outside its band."""
    low, high = (limit if math.isfinite(limit) else None for limit in limits)
    text = f"{name} is {value:.3g}, outside {_range(low, high)} as learnt from the first steps"
    return Alarm(step, name, value, low, high, step, text)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"the band up to {high:.3g}"
    return f"the band from {low:.3g} on" if high is None else f"the band {low:.3g} to {high:.3g}"


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
