"""How long a step takes on N trainers and M rollout engines: a simulation of events, without a model or a device.

It follows `rollout/remote` and the loop of a trainer. A batch's prompts go to the engines in pieces, from one queue,
one piece at a time to each; the trainer waits for all pieces of its batch, trains, and posts new weights, which an
engine takes over before its next piece. With a staleness k, up to k batches are begun behind the one that is trained
on. With partial rollouts idle engines share the unfinished responses, for so many tokens of each, and take new weights
in between. Without engines of its own a run is colocated: every device generates its share, and all wait for the
slowest.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError

Lengths = Callable[[int], np.ndarray]  # number of a batch -> tokens of its responses (prompts, samples)


@dataclass(frozen=True)
class Costs:
    """Seconds. token: a decode step of an engine, row: more of it for each response at work; prompt: reading one;
    slots: responses that an engine works on at once; load: an engine takes over weights; learn: scoring and training
    of a response's token on one trainer; step: what a step takes besides, however many trainers there are; piece: the
    way of a piece of work to an engine and back."""

    token: float
    row: float = 0.0
    prompt: float = 0.0
    slots: int = 256
    load: float = 0.0
    learn: float = 0.0
    step: float = 0.0
    piece: float = 0.0


@dataclass(frozen=True)
class Layout:
    """engines 0: colocated on the trainers. shares: pieces of a batch for each engine. partial_tokens: of a segment."""

    trainers: int
    engines: int = 0
    staleness: int = 0
    partial: bool = False
    shares: int = 2
    partial_tokens: int = 256

    def __post_init__(self) -> None:
        if self.trainers < 1 or self.engines < 0 or self.staleness < 0:
            raise ConfigError("a layout has one trainer or more, and no negative numbers")
        if not self.engines and (self.staleness or self.partial):
            raise ConfigError("engines on the trainers' devices work when these do not: no staleness, nothing partial")

    @property
    def name(self) -> str:
        """In words."""
        if not self.engines:
            return f"{self.trainers} colocated"
        ahead = f", max_staleness {self.staleness}" if self.staleness else ""
        return f"{self.trainers} trainers + {self.engines} engines{ahead}{', partial' if self.partial else ''}"


@dataclass(frozen=True)
class Forecast:
    """Of a step: seconds, the shares of time in which trainers and engines wait, and how many versions old its tokens
    are, on average and at most."""

    layout: Layout
    step_seconds: float
    idle_trainers: float
    idle_engines: float
    staleness: float = 0.0
    staleness_max: int = 0


def simulate(costs: Costs, layout: Layout, lengths: Lengths, steps: int = 24) -> Forecast:
    """A run of `steps` steps, of which the first ones, while batches begin to run ahead, do not count."""
    if not layout.engines:
        return _colocated(costs, layout, lengths, steps)
    return _Run(costs, layout, lengths, steps).run()


def decode_seconds(lengths: Sequence[int] | np.ndarray, costs: Costs) -> float:
    """Of one engine for responses that are all there; those beyond its slots wait for the first ones to end."""
    lengths = np.asarray(lengths).ravel()
    if len(lengths) <= costs.slots:
        ordered = np.sort(lengths)
        active = len(ordered) - np.arange(len(ordered))
        return float(np.diff(ordered, prepend=0) @ (costs.token + costs.row * active))
    running = [int(each) for each in lengths[: costs.slots]]
    heapq.heapify(running)
    done, seconds = 0, 0.0
    for waiting in itertools.chain(lengths[costs.slots :], itertools.repeat(None, costs.slots)):
        first = running[0]
        seconds += (first - done) * (costs.token + costs.row * len(running))
        done = first
        heapq.heappop(running)
        if waiting is not None:
            heapq.heappush(running, done + int(waiting))
    return seconds


def generate_seconds(lengths: np.ndarray, costs: Costs) -> float:
    """Of one engine for the responses (prompts, samples) of some prompts."""
    return costs.prompt * len(lengths) + decode_seconds(lengths, costs)


def _learn_seconds(lengths: np.ndarray, costs: Costs, layout: Layout) -> float:
    return costs.step + costs.learn * float(lengths.sum()) / layout.trainers


def _colocated(costs: Costs, layout: Layout, lengths: Lengths, steps: int) -> Forecast:
    total, waited = 0.0, 0.0
    for number in range(steps):
        batch = lengths(number)
        shares = [batch[first :: layout.trainers] for first in range(min(layout.trainers, len(batch)))]
        own = np.zeros(layout.trainers)
        own[: len(shares)] = [generate_seconds(share, costs) for share in shares]
        waited += float((own.max() - own).mean())
        total += float(own.max()) + costs.load + _learn_seconds(batch, costs, layout)
    return Forecast(layout, total / steps, waited / total, waited / total)


@dataclass
class _Piece:
    """Prompts that one engine does together."""

    batch: int
    lengths: np.ndarray


@dataclass
class _Response:
    """Of partial rollouts. left: tokens to come; version: of the weights of its first token; versions: their sum over
    its tokens so far."""

    batch: int
    length: int
    left: int
    version: int | None = None
    versions: int = 0


@dataclass
class _Engine:
    """held: the version of its weights; busy: seconds at work so far."""

    held: int = 0
    busy: float = 0.0
    free: bool = True


class _Run:
    """One simulated run with engines of its own."""

    def __init__(self, costs: Costs, layout: Layout, lengths: Lengths, steps: int) -> None:
        self.costs, self.layout, self.lengths, self.steps = costs, layout, lengths, steps
        self.engines = [_Engine() for _ in range(layout.engines)]
        self.now, self.version, self.announced = 0.0, 0, 0
        self.queue: deque[_Piece] = deque()
        self.responses: deque[_Response] = deque()
        self.samples = 1
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.left: dict[int, int] = {}  # pieces of a batch that are not done
        self.batches: dict[int, np.ndarray] = {}
        self.waiting: int | None = None  # the batch that the trainer waits for
        self.asked: list[float] = []
        self.worked: list[float] = []
        self.ages: list[list[tuple[float, int, float]]] = [[] for _ in range(steps)]  # (mean, most, tokens) of a piece
        self.busy_at: list[float] = []

    def run(self) -> Forecast:
        self._ask(0)
        while self.events:
            self.now, _, happens = heapq.heappop(self.events)
            happens()
        # At first batches do not run ahead yet, and behind the last ones there is none.
        first, last = min(2 * self.layout.staleness + 1, self.steps - 1), self.steps - self.layout.staleness
        last = max(last, first + 1)
        seconds = (self.asked[last] - self.asked[first]) / (last - first)
        work = sum(self.worked[first:last]) / (last - first)
        busy = (self.busy_at[last] - self.busy_at[first]) / (last - first) / len(self.engines)
        ages = [each for step in self.ages[first:last] for each in step]
        tokens = sum(count for *_, count in ages)
        mean = sum(age * count for age, _, count in ages) / max(tokens, 1)
        idle = (max(0.0, 1 - spent / seconds) for spent in (work, busy))
        return Forecast(self.layout, seconds, *idle, mean, max(most for _, most, _ in ages))

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), happens))

    # -- the trainer ---------------------------------------------------------------------------------------------

    def _ask(self, step: int) -> None:
        self.asked.append(self.now)
        self.busy_at.append(sum(engine.busy for engine in self.engines))
        if step == self.steps:
            return
        while self.announced <= min(step + self.layout.staleness, self.steps - 1):
            self._announce(self.announced)
            self.announced += 1
        self.waiting = step
        self._begin_work()
        self._train_if_ready()

    def _announce(self, number: int) -> None:
        batch = self.batches[number] = self.lengths(number)
        if self.layout.partial:
            self.left[number], self.samples = batch.size, batch.shape[1]
            self.responses.extend(_Response(number, int(each), int(each)) for each in batch.ravel())
            return
        count = len(self.engines)
        size = -(-len(batch) // (count * self.layout.shares if count > 1 else 1))
        pieces = [batch[start : start + size] for start in range(0, len(batch), size)]
        self.left[number] = len(pieces)
        self.queue.extend(_Piece(number, piece) for piece in pieces)

    def _train_if_ready(self) -> None:
        step = self.waiting
        if step is None or self.left[step]:
            return
        self.waiting = None
        seconds = _learn_seconds(self.batches.pop(step), self.costs, self.layout)
        self.worked.append(seconds)
        self._at(self.now + seconds, lambda: self._trained(step))

    def _trained(self, step: int) -> None:
        self.version += 1
        self._ask(step + 1)

    # -- engines -------------------------------------------------------------------------------------------------

    def _begin_work(self) -> None:
        if self.layout.partial:
            self._begin_segments()
            return
        for engine in self.engines:
            if self.queue and engine.free:
                self._begin_piece(engine, self.queue.popleft())

    def _occupy(self, engine: _Engine, seconds: float, done: Callable[[], None]) -> None:
        """An engine works on what takes `seconds` there, with the newest weights."""
        seconds += self.costs.piece + (self.costs.load if engine.held != self.version else 0.0)
        engine.held, engine.free = self.version, False

        def end() -> None:
            engine.free, engine.busy = True, engine.busy + seconds
            done()

        self._at(self.now + seconds, end)

    def _begin_piece(self, engine: _Engine, piece: _Piece) -> None:
        age = piece.batch - self.version

        def done() -> None:
            self._done(piece.batch, age, age, float(piece.lengths.sum()))
            self._begin_work()

        self._occupy(engine, generate_seconds(piece.lengths, self.costs), done)

    def _done(self, batch: int, mean: float, most: int, tokens: float) -> None:
        self.ages[batch].append((mean, most, tokens))
        self.left[batch] -= 1
        self._train_if_ready()

    def _begin_segments(self) -> None:
        """Idle engines share what waits, the oldest first."""
        idle = [engine for engine in self.engines if engine.free]
        while idle and self.responses:
            count = min(self.costs.slots, -(-len(self.responses) // len(idle)))
            self._begin_segment(idle.pop(0), [self.responses.popleft() for _ in range(count)])

    def _begin_segment(self, engine: _Engine, responses: list[_Response]) -> None:
        tokens = [min(each.left, self.layout.partial_tokens) for each in responses]
        for each, count in zip(responses, tokens):
            each.version = self.version if each.version is None else each.version
            each.versions += count * self.version
        begun = sum(each.left == each.length for each in responses)  # what they have so far is read from a cache

        def done() -> None:
            for each, count in zip(responses, tokens):
                each.left -= count
            self.responses.extendleft(each for each in reversed(responses) if each.left)
            for each in responses:
                if not each.left:
                    mean = each.batch - each.versions / each.length
                    self._done(each.batch, mean, each.batch - each.version, each.length)
            self._begin_segments()

        seconds = self.costs.prompt * begun / self.samples + decode_seconds(tokens, self.costs)
        self._occupy(engine, seconds, done)


# -- lengths of responses ----------------------------------------------------------------------------------------


def drawn_from(found: Sequence[int], prompts: int, samples: int, seed: int = 0) -> Lengths:
    """Batches drawn from lengths that a run had."""
    found = np.asarray(found)
    return lambda number: np.random.default_rng((seed, number)).choice(found, (prompts, samples))


def long_tailed(mean: float, spread: float, longest: int, prompts: int, samples: int, seed: int = 0) -> Lengths:
    """Log-normal lengths: spread is the standard deviation of the logarithm; those above `longest` are cut off."""

    def lengths(number: int) -> np.ndarray:
        draw = np.random.default_rng((seed, number))
        drawn = draw.lognormal(np.log(mean) - spread**2 / 2, spread, (prompts, samples))
        return np.clip(np.rint(drawn), 1, longest).astype(int)

    return lengths


# -- costs that were measured ------------------------------------------------------------------------------------


def measured(times: Mapping[str, float], ranks: int, lengths: Lengths, slots: int = 256) -> Costs:
    """Costs of a colocated run from the seconds of its phases (generate, reward, forward, train, sync) on `ranks`.

    What a response costs a decode step beside others cannot be told from that: all of it goes to the step.
    """
    batches = range(4)
    decoding = _colocated(Costs(1.0, slots=slots), Layout(ranks), lengths, len(batches)).step_seconds
    tokens = np.mean([lengths(number).sum() for number in batches])
    return Costs(
        token=float(times["generate"] / decoding),
        slots=slots,
        load=times["sync"],
        learn=float((times["forward"] + times["train"]) * ranks / tokens),
        step=times["reward"],
    )


# -- the best division -------------------------------------------------------------------------------------------


def layouts(gpus: int, stalenesses: Iterable[int] = (0, 1, 2)) -> list[Layout]:
    """Colocated, and the divisions of some GPUs by eighths."""
    parts = sorted({max(1, gpus * eighth // 8) for eighth in range(1, 8)} - {gpus})
    return [Layout(gpus)] + [Layout(part, gpus - part, staleness) for part in parts for staleness in stalenesses]


def best(costs: Costs, tried: Sequence[Layout], lengths: Lengths, steps: int = 12) -> list[Forecast]:
    """Forecasts of layouts, the quickest first; of equally quick ones (2 %) the least stale."""
    found = [simulate(costs, layout, lengths, steps) for layout in tried]
    return sorted(found, key=lambda each: (round(np.log(each.step_seconds) / 0.02), each.layout.staleness))
