"""The time of each phase of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .collectives import all_gather_object


class PhaseTimer:
    """Wall-clock seconds of each phase of a step.

    `with timer.phase("generate"): …` adds to `time_generate`. Phases may nest: the inner one's time is taken off the
    outer one, so that phases never count a second twice and their sum is at most `time_step`. `synchronize` (such as
    the accelerator's) runs at each boundary, or queued device work would be charged to a later phase. `current` is the
    innermost running phase, for messages about stalls; `failed_in` the innermost one that an error left.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        self._synchronize = synchronize
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._running: list[list] = []  # [name, start, seconds of inner phases]
        self._began = clock()
        self.failed_in: str | None = None

    @property
    def current(self) -> str | None:
        """The innermost running phase, None between phases."""
        return self._running[-1][0] if self._running else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the enclosed time to `name`, also when it raises."""
        self._running.append([name, self._now(), 0.0])
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            _, start, inner = self._running.pop()
            spent = self._now() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent - inner
            if self._running:
                self._running[-1][2] += spent

    def collect(self) -> dict[str, float]:
        """`time_<phase>` and `time_step` in seconds since the last call, on this rank; starts the next step."""
        now = self._now()
        times = {f"time_{name}": seconds for name, seconds in self._seconds.items()}
        times["time_step"] = now - self._began
        self._seconds, self._began = {}, now
        return times

    def reduce(self) -> dict[str, float]:
        """`collect` on every rank, the slowest rank's time of each phase (a collective)."""
        ranks = all_gather_object(self.collect())
        names = dict.fromkeys(name for times in ranks for name in times)
        return {name: max(times.get(name, 0.0) for times in ranks) for name in names}

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()
