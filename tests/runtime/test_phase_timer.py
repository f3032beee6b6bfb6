"""The time of nested phases."""

from types import SimpleNamespace

import pytest

from lightrft_visual.runtime import phase_timer
from lightrft_visual.runtime.phase_timer import PhaseTimer


def test_phases_nest_without_counting_twice_and_one_that_raises_is_left():
    clock, waits = SimpleNamespace(now=100.0), []
    timer = PhaseTimer(synchronize=lambda: waits.append(1), clock=lambda: clock.now)
    with timer.phase("train"):
        clock.now += 1
        with timer.phase("sync"):
            assert timer.current == "sync"
            clock.now += 2
        clock.now += 4
    assert len(waits) == 4  # the device is waited for at each boundary
    clock.now += 8
    with timer.phase("sync"):
        clock.now += 16
    assert timer.current is None
    assert timer.collect() == {"time_sync": 18.0, "time_train": 5.0, "time_step": 31.0}
    clock.now += 1
    assert timer.collect() == {"time_step": 1.0}
    with pytest.raises(KeyError), timer.phase("reward"):
        clock.now += 3
        raise KeyError
    assert timer.current is None and timer.collect()["time_reward"] == 3.0


def test_the_slowest_rank_sets_the_time(monkeypatch):
    monkeypatch.setattr(phase_timer, "all_gather_object", lambda value: [value, {"time_reward": 2.0, "time_step": 9.0}])
    assert PhaseTimer(clock=lambda: 100.0).reduce() == {"time_step": 9.0, "time_reward": 2.0}
