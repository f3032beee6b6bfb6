"""The time of nested phases."""

import pytest

from lightrft_visual.runtime import phase_timer
from lightrft_visual.runtime.phase_timer import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_nest_without_counting_twice():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1
        with timer.phase("sync"):
            assert timer.current == "sync"
            clock.now += 2
        clock.now += 4
    clock.now += 8
    with timer.phase("sync"):
        clock.now += 16
    assert timer.current is None
    assert timer.collect() == {"time_sync": 18.0, "time_train": 5.0, "time_step": 31.0}
    clock.now += 1
    assert timer.collect() == {"time_step": 1.0}


def test_a_phase_that_raises_is_timed_and_left():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with pytest.raises(KeyError), timer.phase("reward"):
        clock.now += 3
        raise KeyError
    assert timer.current is None and timer.collect()["time_reward"] == 3.0


def test_the_device_is_waited_for_at_each_boundary():
    calls = []
    timer = PhaseTimer(synchronize=lambda: calls.append(1), clock=Clock())
    with timer.phase("train"):
        pass
    assert len(calls) == 2


def test_the_slowest_rank_sets_the_time(monkeypatch):
    monkeypatch.setattr(phase_timer, "all_gather_object", lambda value: [value, {"time_reward": 2.0, "time_step": 9.0}])
    assert PhaseTimer(clock=Clock()).reduce() == {"time_step": 9.0, "time_reward": 2.0}
