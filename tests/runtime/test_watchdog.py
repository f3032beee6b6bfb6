"""The watchdog against a store in memory and a clock that the test moves."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lightrft_visual.runtime.phase_timer import PhaseTimer
from lightrft_visual.runtime.watchdog import Watchdog


class MemoryStore:
    """A TCPStore's methods over a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.down = False

    def _reach(self) -> None:
        if self.down:
            raise RuntimeError("connection reset")

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._reach()
        return self.values[key]


class Ranks:
    """Watchdogs of several ranks in one process; `pass_time` lets the living ones beat every second."""

    def __init__(self, count: int, limit: float = 10.0):
        self.store, self.now, self.ended = MemoryStore(), 100.0, {}
        self.timers = [PhaseTimer() for _ in range(count)]
        self.dogs = [self._dog(rank, count, limit) for rank in range(count)]

    def _dog(self, rank: int, count: int, limit: float) -> Watchdog:
        def end(message: str) -> None:
            self.ended.setdefault(rank, message)

        return Watchdog(lambda: self.store, rank, count, limit, end, self.timers[rank], clock=lambda: self.now)

    def pass_time(self, seconds: int, alive: tuple[int, ...]) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for rank in alive:
                if rank not in self.ended:
                    self.dogs[rank].beat()
                    self.dogs[rank].judge()


def test_a_long_stage_is_no_stall():
    ranks = Ranks(2)
    with ranks.timers[0].phase("generate"), ranks.timers[1].phase("reward"):
        ranks.pass_time(1000, alive=(0, 1))
    assert not ranks.ended


def test_a_rank_that_beats_no_more_ends_the_others_with_stages_named():
    ranks = Ranks(3)
    with ranks.timers[0].phase("train"), ranks.timers[1].phase("generate"):
        ranks.pass_time(3, alive=(0, 1, 2))
        ranks.pass_time(10, alive=(0, 2))
        assert not ranks.ended
        ranks.pass_time(2, alive=(0, 2))
    assert set(ranks.ended) == {0, 2}
    assert "rank 1 has given no sign of life for 11 s" in ranks.ended[0]
    assert "last stage: generate" in ranks.ended[0] and "rank 0 ends in stage: train" in ranks.ended[0]


def test_a_rank_that_never_started_is_found_too():
    ranks = Ranks(2)
    ranks.pass_time(12, alive=(0,))
    assert "rank 1" in ranks.ended[0] and "start-up" in ranks.ended[0]


def test_a_store_that_is_gone_counts_against_its_rank():
    ranks = Ranks(2)
    ranks.pass_time(3, alive=(0, 1))
    ranks.store.down = True
    ranks.pass_time(9, alive=(1,))
    assert not ranks.ended
    ranks.pass_time(3, alive=(1,))
    assert "rank 0 has given no sign of life" in ranks.ended[1]


def test_a_store_that_comes_back_is_no_stall():
    ranks = Ranks(2)
    for _ in range(20):
        ranks.store.down = True
        ranks.pass_time(4, alive=(0, 1))
        ranks.store.down = False
        ranks.pass_time(1, alive=(0, 1))
        ranks.pass_time(1, alive=(0, 1))
    assert not ranks.ended


def test_a_rank_that_slept_itself_does_not_accuse_the_others():
    ranks = Ranks(2)
    ranks.pass_time(3, alive=(0, 1))
    ranks.now += 500  # rank 0 was stopped; rank 1 went on, but its beat is read only after this
    ranks.dogs[0].judge()
    ranks.pass_time(5, alive=(0, 1))
    assert not ranks.ended


def test_a_failure_ends_the_others_at_once_with_its_text():
    ranks = Ranks(2)
    ranks.pass_time(2, alive=(0, 1))
    with pytest.raises(ValueError), ranks.timers[1].phase("reward"):
        raise ValueError("no")
    assert ranks.dogs[1].stage == "reward"
    ranks.dogs[1].report_failure("RewardError: score returned 3 numbers")
    ranks.pass_time(1, alive=(0,))
    assert "rank 1 failed: RewardError: score returned 3 numbers" in ranks.ended[0]


def test_a_rank_that_is_gone_is_named_unless_it_has_said_why_it_ends():
    ranks = Ranks(3)
    ranks.pass_time(2, alive=(0, 1, 2))
    ranks.dogs[1].report_failure("RewardError: score returned 3 numbers")
    ranks.dogs[0].lost(1, "")
    ranks.dogs[2].lost(0, "what rank 0 said")
    assert ranks.ended[0].startswith("rank 1 failed: RewardError: score returned 3 numbers; rank 0 ends in stage")
    assert ranks.ended[2].startswith("what rank 0 said; rank 2 ends in stage")
    ranks = Ranks(2)
    ranks.dogs[0].lost(1, "")
    assert ranks.ended[0].startswith("rank 1 is gone: its process has ended")


def test_a_rank_that_fails_itself_is_not_ended_by_others_that_end_after_it():
    ranks = Ranks(2)
    ranks.dogs[1].report_failure("RewardError: score returned 3 numbers")
    ranks.dogs[1].lost(0, "")
    assert not ranks.ended


def test_the_stage_between_phases_and_before_the_loop():
    dog = Watchdog(MemoryStore, 0, 1, 10.0, lambda message: None)
    assert dog.stage == "start-up"
    dog.timer = PhaseTimer()
    assert dog.stage == "between phases"


def test_a_beat_that_hangs_in_the_store_does_not_stop_the_judging():
    """A stopped process that holds the store answers nothing; its socket stays open."""
    ranks = Ranks(2)
    ranks.pass_time(3, alive=(0, 1))
    for _ in range(12):
        ranks.now += 1.0
        ranks.dogs[1].judge()
    assert "rank 0 has given no sign of life" in ranks.ended[1]


@pytest.mark.slow
def test_threads_find_a_silent_rank():
    ended = threading.Event()
    dog = Watchdog(MemoryStore, 0, 2, 0.2, lambda message: ended.set())
    dog.start("127.0.0.1")
    assert ended.wait(20)
    dog.stop()


SLOW_STORE = """
import os, threading, time
import torch.distributed as dist
from lightrft_visual.runtime import collectives, watchdog

class Slow:
    def __init__(self, *args, **kwargs): pass
    def set(self, key, value): pass
    def check(self, keys):
        asked.set()
        time.sleep(0.5)
        print("answered", flush=True)
        return False

asked = threading.Event()
dist.TCPStore = Slow
collectives.world_size = lambda: 2
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
watchdog.start(limit=20)
assert asked.wait(60)
"""


@pytest.mark.slow
def test_no_thread_is_inside_the_store_when_the_process_ends():
    """A thread that the interpreter kills inside torch's C++ aborts the process: "terminate called"."""
    child = subprocess.run([sys.executable, "-c", SLOW_STORE], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert set(child.stdout.split()) == {"answered"}


@pytest.mark.slow
def test_the_end_of_the_watch_is_the_end_of_its_threads():
    ranks = Ranks(2, limit=1.0)
    dog = ranks.dogs[0]
    dog.start("127.0.0.1")
    threads = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    dog.stop()
    assert len(threads) == 3 and not any(thread.is_alive() for thread in threads)
