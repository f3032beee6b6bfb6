"""The pool of workers with threads in the place of processes: order, load, deaths."""

import sys
import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.placement import ResourcesConfig
from lightrft_visual.config.shared import DistributedConfig
from lightrft_visual.config.vl import RunConfig
from lightrft_visual.errors import ConfigError, RolloutError
from lightrft_visual.experience.rollouts import PromptFeatures, SamplingSettings
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.plugins.ray import cluster as ray_cluster
from lightrft_visual.plugins.ray.drawing import check_remote as check_diffusion
from lightrft_visual.plugins.ray.rollout import ray_workers
from lightrft_visual.plugins.ray.rollout.engine import RemoteEngine, Workers
from lightrft_visual.plugins.ray.rollout.engine import check_remote as check_vl
from lightrft_visual.plugins.ray.rollout.pool import LOOK_SECONDS, MOST_DEATHS, WorkerDied, WorkerPool, _Piece
from lightrft_visual.plugins.ray.rollout.ray_workers import Cluster, RayWorker, divided
from lightrft_visual.rollout.weight_sync import Posted
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.host_memory import free_port


class Handle:
    """A worker that does work by a function of (this, order, arguments)."""

    def __init__(self, name, work):
        self.name, self.work, self.done, self.restarts = name, work, [], 0

    def call(self, method, version, posted, caches, arguments):
        assert method == "run"
        order = SimpleNamespace(version=version, posted=posted, caches=caches)
        made = self.work(self, order, arguments)
        self.done.append(arguments)
        return made, order.version

    def wait_until_back(self):
        self.restarts += 1


def failing(error):
    """Work, or the call of a worker, that ends with this error."""

    def fail(*arguments):
        raise error

    return fail


def test_whoever_is_free_takes_the_next_piece(pool_of):
    begun, rest_done = threading.Event(), threading.Event()

    def work(handle, order, arguments):
        if handle.name == "slow":
            begun.set()
            assert rest_done.wait(60)
        else:
            assert begun.wait(60)
        if len(handles[1].done) == 4:  # this is its fifth and last
            rest_done.set()
        return arguments[0] * 10

    handles = [Handle("slow", work), Handle("quick", work)]
    pool = pool_of(handles)
    futures = [pool.submit(number) for number in range(6)]
    assert [future.result(60) for future in futures] == [(number * 10, 0) for number in range(6)]
    assert [len(handle.done) for handle in handles] == [1, 5]
    assert 0 < pool.busy_share() <= 1


def test_what_a_dead_worker_held_is_done_by_another_once(pool_of):
    deaths = iter([True, True])

    def work(handle, order, arguments):
        if arguments[0] == 2 and next(deaths, False):
            raise WorkerDied("killed")
        return arguments[0]

    handles = [Handle("a", work), Handle("b", work)]
    pool = pool_of(handles)
    futures = [pool.submit(number) for number in range(5)]
    assert [future.result(60)[0] for future in futures] == list(range(5))
    counted = Counter(number for handle in handles for (number,) in handle.done)
    assert counted == Counter(range(5)) and pool.deaths == 2


def test_work_that_kills_every_worker_ends_with_an_error():
    pool = WorkerPool([Handle("a", failing(WorkerDied("out of memory")))])
    with pytest.raises(RolloutError, match=f"{MOST_DEATHS} workers died over the same prompts.*out of memory"):
        pool.submit(1).result(60)
    pool.close()
    with pytest.raises(RolloutError, match="closed"):
        pool.submit(1).result(60)


def test_a_worker_that_does_not_come_back_is_left_out(pool_of):
    handles = [Handle("lost", failing(WorkerDied("host gone"))), Handle("kept", lambda *_: "made")]
    handles[0].wait_until_back = failing(RolloutError("not back within 600 s"))
    pool = pool_of(handles)
    assert [pool.submit(number).result(60)[0] for number in range(8)] == ["made"] * 8


def test_a_worker_that_is_still_coming_back_when_the_run_ends_is_no_loss(caplog):
    closing, closed = threading.Event(), threading.Event()

    def gone():
        closing.set()
        assert closed.wait(60)
        raise RolloutError("the connection to Ray is closed")

    handle = Handle("a", failing(WorkerDied("killed")))
    handle.wait_until_back = gone
    pool = WorkerPool([handle])
    pool.submit(1)
    assert closing.wait(60)
    pool.close()
    closed.set()
    pool._threads[0].join(60)
    assert "it is started again" in caplog.text and "does not come back" not in caplog.text


@pytest.mark.parametrize("put_back", ["_again", "_passed_on"])
def test_work_that_is_put_back_as_the_pool_ends_is_answered(pool_of, put_back):
    pool = pool_of([])
    pool.copied, put = False, pool._queue.put
    pool.workers = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    death = [WorkerDied("killed")] if put_back == "_again" else []
    piece = _Piece(0, 0, (), Future())

    def put_late(piece):  # after a look at whether all is well
        pool._fail(RolloutError("no rollout worker is left"))
        put(piece)

    pool._queue.put = put_late
    getattr(pool, put_back)(piece, pool.workers[0], *death)
    with pytest.raises(RolloutError, match="no rollout worker is left"):
        piece.result.result(0)


def test_no_work_waits_for_workers_that_are_gone(pool_of):
    """Also what is submitted in the moment in which the last one is given up."""
    pool = pool_of([])
    put = pool._queue.put

    def put_late(piece):  # after a look at whether all is well
        pool._fail(RolloutError("no rollout worker is left"))
        put(piece)

    pool._queue.put = put_late
    for _ in range(2):
        with pytest.raises(RolloutError, match="no rollout worker is left"):
            pool.submit(1).result(60)
    engine = RemoteEngine(SimpleNamespace(pool=pool))
    with pytest.raises(RolloutError, match="no rollout worker is left"):
        engine.generate([PromptFeatures("", [1], 0)], SamplingSettings())
    assert pool.busy_share() == 0


@pytest.mark.parametrize("reads_patches", [False, True])
def test_workers_are_sent_what_their_engines_read(pool_of, reads_patches):
    sent = []

    def work(handle, order, arguments):
        prompts, _ = arguments
        sent.extend(prompts)
        return [[] for _ in prompts]

    pool = pool_of([Handle("a", work)])
    engine = RemoteEngine(SimpleNamespace(pool=pool), reads_patches=reads_patches)
    patches = VisionTensors.of(pixel_values=torch.ones(4, 8), image_grid_thw=torch.tensor([[1, 2, 2]]))
    own = PromptFeatures("", [1], 0, reference="x", metadata={"huge": "y"}, images=["image"], vision=patches, seed=3)
    engine.generate([own], SamplingSettings())
    (each,) = sent
    assert (each.seed, each.images, each.reference, each.metadata) == (3, ["image"], None, {})
    assert bool(each.vision.names) == reads_patches and own.vision.names and own.metadata


def test_weights_that_an_idle_worker_cannot_load_end_the_work_of_all(pool_of):
    handle = Handle("a", None)
    handle.call = failing(ConfigError("the worker's model has no such weight"))
    pool = pool_of([handle], shared=True)
    pool.give_weights(1, Posted(1, ()), at_once=False)
    pool._threads[0].join(60)
    with pytest.raises(ConfigError, match="no such weight"):
        pool.submit(1).result(60)


def test_a_rank_raises_what_fails_on_it_alone(monkeypatch):
    """Rank 0, which hands the weights over, had no trouble."""
    monkeypatch.setattr(collectives, "broadcast_object", lambda value: None)

    def tensors():
        yield "a", None
        raise MemoryError("gathering")

    workers = Workers.__new__(Workers)
    workers.post, workers.version = None, 0
    with pytest.raises(MemoryError, match="gathering"):
        workers.update(tensors())


NAMED = ResourcesConfig(visible_devices=[0, 1, 2, 3], trainer_devices=[0], rollout_devices=[1, 2, 3])


@pytest.mark.parametrize(
    ("resources", "trainers", "ranks", "rollouts"),
    [
        (ResourcesConfig(), [0, 1, 2, 3], 2, [2, 3]),
        (ResourcesConfig(rollout_num_gpus="1"), [0, 1, 2, 3], 1, [1]),
        (NAMED, [0], 1, [1, 2, 3]),
        (ResourcesConfig(visible_devices=[4, 5]), [4], 1, [5]),
        (ResourcesConfig(reward_devices=[2]), [0, 1, 2, 3], 1, [1, 3]),
        (ResourcesConfig(visible_devices=[0, 1, 2, 3]), [2, 3], 2, [0, 1]),
        (ResourcesConfig(), [0], 1, "no device is left for rollouts: the trainer has \\[0\\] of \\[0\\]"),
        (NAMED, [0], 2, "the launcher gave 2 rank.s. the device.s. \\[0\\], and trainer_devices names \\[0\\]"),
        (ResourcesConfig(trainer_devices=[2, 3]), [0, 1, 2, 3], 2, "\\[0, 1\\], and trainer_devices names \\[2, 3\\]"),
        (ResourcesConfig(rollout_devices=[0]), [0, 1], 1, "devices \\[0\\] are the trainer's, by the launcher"),
        (ResourcesConfig(reward_devices=[1]), [0, 1, 2], 2, "devices \\[1\\] are the trainer's, by the launcher"),
        (ResourcesConfig(rollout_num_gpus="3"), [0, 1], 1, "rollout_num_gpus is 3"),
    ],
)
def test_devices_are_divided(resources, trainers, ranks, rollouts):
    if isinstance(rollouts, list):
        assert divided(resources, trainers, ranks) == rollouts
        return
    with pytest.raises(ConfigError, match=rollouts):
        divided(resources, trainers, ranks)


def test_one_rank_has_the_device_that_its_program_has_chosen(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert divided(ResourcesConfig(), [4, 5, 6], 1) == [4, 6] and divided(ResourcesConfig(), [4, 5, 6], 2) == [6]


def test_ranks_on_several_hosts_are_told_of_ray(monkeypatch):
    monkeypatch.setattr(ray_workers, "_on_accelerator", lambda: True)
    monkeypatch.setattr(ray_workers.collectives, "world_size", lambda: 16)
    monkeypatch.setattr(ray_workers.presence, "ranks_on_host", lambda: 8)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="16 ranks are on several hosts: .* set RAY_ADDRESS"):
        ray_workers.rollout_devices(ResourcesConfig())


@pytest.mark.parametrize(
    ("own", "told"), [("reward", "the rewards' and the trainer's or"), ("trainer", "the trainer's and")]
)
def test_devices_that_two_are_given_are_refused(own, told):
    with pytest.raises(ConfigError, match=f"devices \\[1\\] are {told} the rollouts' alike"):
        ResourcesConfig(**{f"{own}_devices": [1]}, rollout_devices=[1, 2])


def test_devices_that_a_scheduler_names_otherwise_than_by_numbers(monkeypatch):
    cuda = SimpleNamespace(device_name=lambda: "cuda", visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"])
    monkeypatch.setattr(ray_workers, "get_accelerator", lambda: cuda)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-46e5d0ac")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is 'GPU-8932f937,GPU-46e5d0ac': .*Set it to numbers"):
        ray_workers.rollout_devices(ResourcesConfig(visible_devices=[0, 1]))  # one of which is the trainer's
    assert ray_workers.rollout_devices(ResourcesConfig(visible_devices=[0, 1], trainer_devices=[1])) == [0]


class Accelerated(Cluster):
    """On accelerators, of this host or of a cluster that has some free."""

    def __init__(self, resources, devices=1, free=None):
        self.resources, self.devices = resources, devices
        self.ray = SimpleNamespace(available_resources=lambda: {"CPU": 8.0, "GPU": float(free)})

    def given(self, *devices):
        """What each worker gets of Ray."""
        options = self._options(list(devices), self.resources.rollout_num_workers)
        return [each.get("num_gpus") or each["runtime_env"] for each in options]


def test_a_worker_has_as_many_devices_as_its_engine_has_ranks(monkeypatch):
    monkeypatch.setattr(ray_workers, "_on_accelerator", lambda: True)
    monkeypatch.setattr(ray_workers, "on_devices", lambda *devices: devices)
    two = ResourcesConfig(rollout_num_workers=2)
    assert Accelerated(ResourcesConfig()).given(1, 2, 3) == [(1,), (2,), (3,)]
    assert Accelerated(ResourcesConfig(), devices=2).given(1, 2, 3, 4, 5) == [(1, 2), (3, 4)]
    assert Accelerated(two, devices=2).given(4, 5, 6, 7) == [(4, 5), (6, 7)]
    with pytest.raises(ConfigError, match="3 device.s., for 2 worker.s. of engine_tp_size 2 devices each"):
        Accelerated(two, devices=2).given(1, 2, 3)
    with pytest.raises(ConfigError, match="1 device.s., for 1 worker.s. of engine_tp_size 2"):
        Accelerated(ResourcesConfig(), devices=2).given(1)
    # A cluster gives what others have left, or what is named, for which it may grow.
    assert Accelerated(ResourcesConfig(), devices=2, free=5).given() == [2, 2]
    assert Accelerated(ResourcesConfig(rollout_num_gpus="8"), devices=4, free=0).given() == [4, 4]
    assert Accelerated(two, free=0).given() == [1, 1]
    with pytest.raises(ConfigError, match="rollouts have 0 device"):
        Accelerated(ResourcesConfig(), free=0).given()


@pytest.mark.parametrize(("root", "check"), [(RunConfig, check_vl), (DiffusionRunConfig, check_diffusion)])
def test_a_cluster_that_is_not_there_is_told_before_models_load(monkeypatch, root, check):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = root(distributed=DistributedConfig(placement="split"))
    check(config)
    config.distributed.resources.require_cluster = True
    with pytest.raises(ConfigError, match="needs a Ray cluster: set RAY_ADDRESS"):
        check(config)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    config.distributed.resources.rollout_devices = [1]
    with pytest.raises(ConfigError, match="^rollout_devices: the Ray cluster .* use rollout.num_gpus"):
        check(config)
    config.distributed.resources.rollout_devices = None
    with pytest.raises(ConfigError, match="placement split: no Ray cluster answers at 127.0.0.1"):
        check(config)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package ray"):
        check(config)


def test_workers_that_the_cluster_cannot_place_are_told_with_what_it_has_left():
    cluster = Accelerated(ResourcesConfig(), devices=2, free=1)
    cluster.ray.get = lambda waiting, timeout: failing(TimeoutError())()
    cluster.ray.exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=TimeoutError)
    cluster._probe = SimpleNamespace(at=None)
    cluster._actors = {"a": SimpleNamespace(describe=SimpleNamespace(remote=lambda probe: None))}
    with pytest.raises(ConfigError, match="it has {'CPU': 8.0, 'GPU': 1.0} left.* for 2$"):
        cluster._wait()


def test_an_idle_worker_gets_new_weights_at_once_for_the_other_ranks(pool_of):
    loaded = threading.Event()

    def call(method, *arguments):
        assert method == "load"
        if arguments[0].number == 2:
            loaded.set()

    handle = Handle("a", None)
    handle.call = call
    pool = pool_of([handle], shared=True)
    for number in (1, 2):
        pool.give_weights(number, Posted(number, ()), at_once=False)
    assert loaded.wait(LOOK_SECONDS)


def test_a_worker_is_not_called_once_the_run_has_left_ray():
    """Ray would start a cluster for the call."""
    ray = SimpleNamespace(is_initialized=lambda: False, exceptions=SimpleNamespace(RayError=TimeoutError))
    worker = RayWorker(ray, SimpleNamespace(), "a", timeout=1.0)  # an actor without methods: a call would fail
    with pytest.raises(WorkerDied, match="is closed"):
        worker.call("run")
    with pytest.raises(RolloutError, match="is closed"):
        worker.wait_until_back()


class ActorEnded(Exception):
    preempted = False


def test_a_worker_that_cannot_be_built_again_is_not_waited_for():
    errors = SimpleNamespace(RayError=Exception, ActorDiedError=ActorEnded)
    ray = SimpleNamespace(is_initialized=lambda: True, exceptions=errors)
    actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))
    ray.get = lambda task, timeout: failing(ActorEnded("ray::Actor\n  File a line\nValueError: no room"))()
    with pytest.raises(RolloutError, match="it does not start again: ValueError: no room$"):
        RayWorker(ray, actor, "a", timeout=1.0).wait_until_back()
    moves = ActorEnded()
    moves.preempted, ended = True, iter([moves, None])  # it starts elsewhere

    def get(task, timeout):
        if (error := next(ended)) is not None:
            raise error

    ray.get = get
    RayWorker(ray, actor, "a", timeout=1.0).wait_until_back()
    assert next(ended, "asked twice") == "asked twice"


def test_the_traceback_of_a_worker_is_a_note_of_what_is_raised():
    class TaskError(Exception):
        cause = RolloutError("no tokens")

    other = type("Other", (Exception,), {})
    errors = SimpleNamespace(GetTimeoutError=other, RayTaskError=TaskError, RayError=TaskError)
    ray = SimpleNamespace(is_initialized=lambda: True, exceptions=errors)
    ray.get = lambda task, timeout: failing(TaskError("Traceback of the worker"))()
    actor = SimpleNamespace(run=SimpleNamespace(remote=lambda: None))
    with pytest.raises(RolloutError, match="^no tokens") as raised:
        RayWorker(ray, actor, "a", timeout=1.0).call("run")
    assert raised.value.__notes__ == ["Traceback of the worker"]


@pytest.mark.parametrize("workers,whole,parts", [(1, 1, [10]), (2, 1, [3, 3, 3, 1]), (2, 4, [4, 4, 2]), (0, 1, [10])])
def test_a_batch_is_shared_out_in_whole_micro_batches_twice_to_each_worker(pool_of, workers, whole, parts):
    pool = pool_of([SimpleNamespace(name=str(number)) for number in range(workers)])
    pieces = pool.pieces(10, whole)
    assert [len(range(10)[piece]) for piece in pieces] == parts and pool.pieces(0) == []
