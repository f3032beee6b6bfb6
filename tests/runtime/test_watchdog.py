"""The watchdog over connections of one process and a clock that the test moves; test_presence.py has whole ranks."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from lightrft_visual.runtime.phase_timer import PhaseTimer
from lightrft_visual.runtime.watchdog import POLL, STAGE, Watchdog

LIMIT = 60.0


class Ranks:
    """Watchdogs of several ranks, each connected with rank 0; `pass_time` lets the living ones say something."""

    def __init__(self, count: int):
        self.now, self.ended = 100.0, {}
        self.timers = [PhaseTimer() for _ in range(count)]
        self.dogs = [self._dog(rank, count) for rank in range(count)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            for rank, dog in enumerate(self.dogs[1:], start=1):
                dog.keep(socket.create_connection(server.getsockname()), 0)
                self.dogs[0].keep(server.accept()[0], rank)

    def _dog(self, rank: int, count: int) -> Watchdog:
        def end(message: str) -> None:
            self.ended.setdefault(rank, message)

        return Watchdog(rank, count, 10.0, end, self.timers[rank], clock=lambda: self.now)

    def pass_time(self, seconds: int, alive: tuple[int, ...]) -> None:
        for _ in range(seconds):
            self.now += 1.0
            living = [self.dogs[rank] for rank in alive if rank not in self.ended]
            for dog in living:
                dog.say(STAGE, dog.stage)
            for dog in living:
                dog.look(0.0)
                dog.judge()


@pytest.mark.parametrize("silent", [1, 0])
def test_a_rank_that_says_nothing_more_ends_the_others_with_stages_named(silent):
    ranks = Ranks(3)
    others = (1 - silent, 2)
    with ranks.timers[1 - silent].phase("train"), ranks.timers[silent].phase("generate"):
        ranks.pass_time(3, alive=(0, 1, 2))
        ranks.pass_time(10, alive=others)
        assert not ranks.ended
        ranks.pass_time(2, alive=others)
    assert set(ranks.ended) == set(others)
    told = f"rank {silent} has given no sign of life for 11 s (collective_timeout 10); its last stage: generate"
    assert all(ranks.ended[rank].startswith(told) for rank in others)
    assert ranks.ended[1 - silent].endswith(f"rank {1 - silent} ends in stage: train")


def test_neither_a_long_stage_nor_a_rank_that_slept_itself_is_a_stall_of_another():
    ranks = Ranks(2)
    with ranks.timers[0].phase("generate"), ranks.timers[1].phase("reward"):
        ranks.pass_time(1000, alive=(0, 1))  # a long stage is no stall
    ranks.now += 500  # rank 0 was stopped; rank 1 went on, but its word is read only after this
    ranks.dogs[0].judge()
    ranks.pass_time(5, alive=(0, 1))
    assert not ranks.ended


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_the_others_at_once_with_its_text_and_not_the_rank_itself(failing, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    ranks, others = Ranks(3), (1 - failing, 2)
    ranks.pass_time(2, alive=(0, 1, 2))
    with pytest.raises(ValueError), ranks.timers[failing].phase("reward"):
        raise ValueError("no")
    assert ranks.dogs[failing].stage == "reward"
    ranks.dogs[failing].report_failure("RewardError: score returned 3 numbers")
    ranks.pass_time(1, alive=(0, 1, 2))
    assert set(ranks.ended) == set(others)
    assert all(ranks.ended[r].startswith(f"rank {failing} failed: RewardError: score returned 3") for r in others)


def test_a_rank_that_is_gone_is_named_by_all_others():
    ranks = Ranks(3)
    for connection in list(ranks.dogs[1]._connections):
        connection.close()
    ranks.pass_time(1, alive=(0, 2))
    assert set(ranks.ended) == {0, 2} and all(told.startswith("rank 1 is gone: its") for told in ranks.ended.values())


def test_the_stage_between_phases_and_before_the_loop():
    dog = Watchdog(0, 1, 10.0, lambda message: None)
    assert dog.stage == "start-up"
    dog.timer = PhaseTimer()
    assert dog.stage == "between phases"


class SlowToSay(Watchdog):
    """Its process stands still for a while before each word to the others."""

    def say(self, kind: str, text: str = "") -> None:
        time.sleep(3 * POLL)
        super().say(kind, text)


class Found(dict):
    """What the ranks need of a store."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:
        return self[key].encode()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_leaves_is_not_gone_however_slowly_it_says_so_and_its_threads_end(first):
    told, store = [], Found()
    ranks = [SlowToSay(rank, 2, 600.0, told.append) for rank in range(2)]
    starts = [threading.Thread(target=rank.start, args=(lambda: store, "key", "127.0.0.1")) for rank in ranks]
    for thread in starts:
        thread.start()
    assert all(rank.complete.wait(LIMIT) for rank in ranks)
    for thread in starts:
        thread.join(LIMIT)
    for rank in (ranks[first], ranks[1 - first]):
        rank.stop()
        assert len(rank._threads) == 2 and not any(thread.is_alive() for thread in rank._threads)
    assert told == []


SLOW_STORE = """
import os, threading, time
import torch.distributed as dist
from lightrft_visual.runtime import collectives, watchdog

class Slow:
    def __init__(self, *args, **kwargs): pass
    def check(self, keys):
        asked.set()
        time.sleep(0.5)
        print("answered", flush=True)
        return False

asked = threading.Event()
dist.TCPStore = Slow
collectives.world_size, collectives.rank, watchdog.GREETING_LIMIT = lambda: 2, lambda: 1, 0
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
