"""The pool of workers with threads in the place of processes: order, load, deaths."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from lightrft_visual.config.placement import ResourcesConfig
from lightrft_visual.errors import ConfigError, RolloutError
from lightrft_visual.rollout.remote.pool import LOOK_SECONDS, MOST_DEATHS, WorkerDied, WorkerPool
from lightrft_visual.rollout.remote.ray_workers import RayWorker, divided
from lightrft_visual.rollout.remote.weights import Posted


class Handle:
    """A worker that does work by a function of (this, order, arguments)."""

    def __init__(self, name, work):
        self.name, self.work, self.done, self.restarts = name, work, [], 0

    def call(self, method, order, arguments):
        assert method == "run"
        made = self.work(self, order, arguments)
        self.done.append(arguments)
        return made, order.version

    def wait_until_back(self):
        self.restarts += 1


def test_whoever_is_free_takes_the_next_piece():
    begun, rest_done = threading.Event(), threading.Event()

    def work(handle, order, arguments):
        if handle.name == "slow":
            begun.set()
            assert rest_done.wait(5)
        else:
            assert begun.wait(5)
        if len(handles[1].done) == 4:  # this is its fifth and last
            rest_done.set()
        return arguments[0] * 10

    handles = [Handle("slow", work), Handle("quick", work)]
    pool = WorkerPool(handles)
    futures = [pool.submit(number) for number in range(6)]
    assert [future.result(5) for future in futures] == [(number * 10, 0) for number in range(6)]
    assert [len(handle.done) for handle in handles] == [1, 5]
    assert 0 < pool.busy_share() <= 1
    pool.close()


def test_what_a_dead_worker_held_is_done_by_another_once():
    deaths = iter([True, True])

    def work(handle, order, arguments):
        if arguments[0] == 2 and next(deaths, False):
            raise WorkerDied("killed")
        return arguments[0]

    handles = [Handle("a", work), Handle("b", work)]
    pool = WorkerPool(handles)
    futures = [pool.submit(number) for number in range(5)]
    assert [future.result(5)[0] for future in futures] == list(range(5))
    counted = Counter(number for handle in handles for (number,) in handle.done)
    assert counted == Counter(range(5)) and pool.deaths == 2
    pool.close()


def test_work_that_kills_every_worker_ends_with_an_error():
    def work(handle, order, arguments):
        raise WorkerDied("out of memory")

    handle = Handle("a", work)
    pool = WorkerPool([handle])
    with pytest.raises(RolloutError, match=f"{MOST_DEATHS} workers died over the same prompts.*out of memory"):
        pool.submit(1).result(5)
    pool.close()
    with pytest.raises(RolloutError, match="closed"):
        pool.submit(1).result(5)


def test_a_worker_that_does_not_come_back_is_left_out():
    def work(handle, order, arguments):
        if handle.name == "lost":
            raise WorkerDied("host gone")
        return "made"

    def gone():
        raise RolloutError("not back within 600 s")

    handles = [Handle("lost", work), Handle("kept", work)]
    handles[0].wait_until_back = gone
    pool = WorkerPool(handles)
    assert [pool.submit(number).result(5)[0] for number in range(8)] == ["made"] * 8
    pool.close()


def test_devices_are_divided():
    assert divided(ResourcesConfig(), [0, 1, 2, 3], 2) == [2, 3]
    assert divided(ResourcesConfig(rollout_num_gpus="1"), [0, 1, 2, 3], 1) == [1]
    named = ResourcesConfig(visible_devices=[0, 1, 2, 3], trainer_devices=[0], rollout_devices=[1, 2, 3])
    assert divided(named, [0], 1) == [1, 2, 3]
    assert divided(ResourcesConfig(visible_devices=[4, 5]), [4], 1) == [5]
    assert divided(ResourcesConfig(reward_devices=[2]), [0, 1, 2, 3], 1) == [1, 3]
    with pytest.raises(ConfigError, match="devices \\[1\\] are the rewards' and the trainer's or the rollouts' alike"):
        ResourcesConfig(reward_devices=[1], rollout_devices=[1, 2])
    with pytest.raises(ConfigError, match="no device is left for rollouts: the trainer has \\[0\\] of \\[0\\]"):
        divided(ResourcesConfig(), [0], 1)
    with pytest.raises(ConfigError, match="trainer_devices names 1 device"):
        divided(named, [0, 1], 2)
    with pytest.raises(ConfigError, match="rollout_num_gpus is 3"):
        divided(ResourcesConfig(rollout_num_gpus="3"), [0, 1], 1)
    with pytest.raises(ConfigError, match="devices \\[1\\] are the trainer's and the rollouts' alike"):
        ResourcesConfig(trainer_devices=[0, 1], rollout_devices=[1])


def test_an_idle_worker_gets_new_weights_at_once_for_the_other_ranks():
    loaded = threading.Event()

    def call(method, *arguments):
        assert method == "load"
        if arguments[0].number == 2:
            loaded.set()

    handle = Handle("a", None)
    handle.call = call
    pool = WorkerPool([handle], shared=True)
    for number in (1, 2):
        pool.give_weights(number, Posted(number, ()), at_once=False)
    assert loaded.wait(LOOK_SECONDS)
    pool.close()


def test_a_worker_is_not_called_once_the_run_has_left_ray():
    """Ray would start a cluster for the call."""

    class Actor:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    ray = SimpleNamespace(is_initialized=lambda: False, exceptions=None)
    worker = RayWorker(ray, Actor(), "a", timeout=1.0)
    with pytest.raises(WorkerDied, match="is closed"):
        worker.call("run")
    with pytest.raises(RolloutError, match="is closed"):
        worker.wait_until_back()
