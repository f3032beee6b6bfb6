"""Weights from the trainer to workers in processes of their own, by a group over gloo; what happens where it breaks."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from worker_processes import KILL, STOP, Member, equal, named

from lightrft_visual.config.constraints import not_usual
from lightrft_visual.config.placement import OF_WORKERS, ResourcesConfig
from lightrft_visual.errors import ConfigError, RolloutError
from lightrft_visual.plugins.ray.rollout import device_weights
from lightrft_visual.plugins.ray.rollout.device_weights import (
    MOST_FAILURES,
    Group,
    WeightSender,
    by_device,
    check_transfer,
    checksum,
)
from lightrft_visual.plugins.ray.rollout.engine import Workers
from lightrft_visual.plugins.ray.rollout.pool import WorkerPool
from lightrft_visual.plugins.ray.rollout.worker import TORN
from lightrft_visual.rollout.weight_sync import WeightPost, received

BOUND = 30  # seconds in which a broken transfer is over, with `LIMIT`
LIMIT = 3.0


@pytest.fixture(scope="module")
def processes():
    made = [Member(name) for name in ("first", "second")]
    yield made
    for each in made:
        each.kill()


@pytest.fixture
def members(processes):
    for each in processes:
        each.make_ready()
    return processes


@pytest.fixture
def sender_to():
    made: list[WeightSender] = []

    def make(members, limit: float = 20.0, **settings) -> WeightSender:
        workers = SimpleNamespace(workers=members)
        made.append(WeightSender(workers, "127.0.0.1", limit=limit, bucket_bytes=200, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def sent(sender: WeightSender, number: int, tensors) -> bool:
    """Whether all have it; every tensor was read."""
    assert sender.ready(number)
    passed = list(sender.through(tensors.items()))
    assert [name for name, _ in passed] == list(tensors)
    return sender.finish()


def test_the_same_bytes_come_as_by_the_host(sender_to, members):
    sender, post = sender_to(members), WeightPost(bucket_bytes=200)
    for number in (1, 2):
        assert sent(sender, number, named(number))
        by_host = dict(received(post.post(named(number).items())))
        assert all(equal(each.call("held"), by_host) and equal(by_host, named(number)) for each in members)
        assert [each.call("describe")["version"] for each in members] == [number, number]
    assert not dist.is_initialized()


def test_at_most_two_buckets_are_alive(sender_to, members, monkeypatch):
    alive, most = [], []
    broadcast, finish = Group.broadcast, Group.finish

    def begun(group, buffer):
        alive.append(buffer)
        most.append(len(alive))
        return broadcast(group, buffer)

    def finished(group, work, stopped):
        finish(group, work, stopped)
        alive.pop(0)

    sender = sender_to(members)
    assert sender.ready(1)
    monkeypatch.setattr(Group, "broadcast", begun)
    monkeypatch.setattr(Group, "finish", finished)
    for _ in sender.through(named().items()):
        pass
    assert sender.finish() and not alive and len(most) > 3 and max(most) == 2


def test_tensors_are_read_while_earlier_ones_are_under_way(sender_to, members):
    """What gathers under ZeRO-3 runs beside the sending."""
    sender, under_way = sender_to(members), []
    assert sender.ready(1)

    def tensors():
        for name, tensor in named().items():
            under_way.append(sender._store.check([f"bucket/1/{len(under_way)}"]))
            yield name, tensor

    for _ in sender.through(tensors()):
        pass
    assert sender.finish() and sender._store.check(["bucket/1/0"])


@pytest.mark.parametrize("name", ["big", "last"])
def test_a_worker_that_dies_on_the_way_is_told_in_time_and_the_host_hands_over(sender_to, members, name, caplog):
    first, second = members
    sender, post = sender_to(members, LIMIT), WeightPost()
    assert sent(sender, 1, named(1))
    second.call("signal_at", name, KILL)
    began = time.monotonic()
    assert not sent(sender, 2, named(2))
    assert time.monotonic() - began < BOUND
    assert "worker second: its process is gone" in caplog.text and "goes through host memory" in caplog.text
    post.number = 1
    posted = post.post(named(2).items())
    assert first.call("describe")["version"] in (TORN, 2)  # what it has is no version, or the whole one
    assert first.call("load", posted) == 2
    assert equal(first.call("held"), named(2))
    second.wait_until_back()
    assert second.call("load", posted) == 2
    assert sent(sender, 3, named(3)) and sender.failures == 0  # joined anew
    assert all(equal(each.call("held"), named(3)) for each in members)


def test_a_worker_that_does_not_answer_on_the_way_is_started_again(sender_to, members, monkeypatch):
    monkeypatch.setattr(device_weights, "GRACE_SECONDS", 1.0)
    _, second = members
    sender, ended = sender_to(members, LIMIT), second.ended
    second.call("signal_at", "big", STOP)
    tensors = named(1) | {"long": torch.ones(50_000_000)}  # more than a connection holds
    began = time.monotonic()
    assert not sent(sender, 1, tensors)
    assert time.monotonic() - began < BOUND and second.ended == ended + 1
    assert sender.failure == f"worker second does not answer (nothing moved for {LIMIT:g} s)"


def test_what_was_damaged_on_the_way_is_refused(sender_to, members):
    first, second = members
    sender = sender_to(members)
    second.call("damage")
    assert not sent(sender, 1, named(1))
    assert "worker second: weight version 1 was damaged on its way" in sender.failure
    assert second.call("describe")["version"] == TORN
    assert second.call("load", WeightPost().post(named(1).items())) == 1
    assert equal(second.call("held"), named(1))
    second.kill()


def test_weights_that_cannot_be_read_are_given_up_for_all(sender_to, members):
    for each in members:
        each.wait_until_back()  # of version 0, which stays where the transfer ends before its first bucket came
    sender = sender_to(members)

    def tensors():
        yield from list(named().items())[:2]
        raise MemoryError("gathering")

    assert sender.ready(1)
    with pytest.raises(MemoryError, match="gathering"):
        list(sender.through(tensors()))
    assert "did not read all" in sender.failure and not sender._calls.wait(BOUND)
    assert all(each.call("describe")["version"] in (TORN, 0) for each in members)
    assert sent(sender, 2, named(2))


def test_a_worker_that_is_not_back_yet_does_not_end_the_sending(sender_to, members):
    sender = sender_to(members)
    assert sent(sender, 1, named(1))
    members[1].kill()
    assert not any(sender.ready(number) for number in range(2, 2 + MOST_FAILURES)) and sender.failures == 0
    members[1].wait_until_back()
    assert sent(sender, 9, named(9))  # joined anew
    assert all(equal(each.call("held"), named(9)) for each in members)


def test_transfers_that_break_one_after_the_other_end_the_sending(sender_to, members, monkeypatch):
    sender = sender_to(members)
    assert sent(sender, 1, named(1))

    def broken(*arguments):
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(sender, "_send", broken)
    assert [sent(sender, number, named()) for number in range(2, 2 + MOST_FAILURES)] == [False] * MOST_FAILURES
    assert not sender.ready(9)


def test_an_address_of_another_host_is_a_failure_and_no_error(sender_to, members, caplog):
    sender = sender_to(members, limit=1.0)
    sender.address = "192.0.2.1"
    assert not sender.ready(1) and "this version goes through host memory, also all later ones" in caplog.text


@pytest.mark.parametrize("required", [False, True])
def test_workers_that_cannot_be_reached_are_tried_once_or_are_an_error(sender_to, required, caplog):
    def away(method, *arguments):
        raise RolloutError("no route to host")

    sender = sender_to([SimpleNamespace(name="away", call=away)], required=required)
    if required:
        with pytest.raises(RolloutError, match="worker away: no route to host.*use weight_transfer host, or auto"):
            sender.ready(1)
    else:
        assert not sender.ready(1) and not sender.ready(2)
        assert caplog.text.count("also all later ones") == 1 and sender.failures == MOST_FAILURES


class Weights:
    """Read anew by each pass, which is noted in passes."""

    def __init__(self, scale: int, passes: list[int] | None = None) -> None:
        self.scale, self.passes = scale, [] if passes is None else passes

    def __iter__(self):
        self.passes.append(self.scale)
        return iter(named(self.scale).items())


@pytest.fixture
def workers_of():
    made: list[Workers] = []

    def make(members, limit: float = LIMIT) -> Workers:
        own = Workers.__new__(Workers)
        own.pool, own.post, own.version = WorkerPool(members), WeightPost(bucket_bytes=200), 0
        own.sender = WeightSender(own.pool, "127.0.0.1", limit=limit, bucket_bytes=200)
        made.append(own)
        return own

    yield make
    for each in made:
        each.pool.close()
        each.sender.close()


def test_a_run_goes_on_by_the_host_where_a_worker_dies_on_the_way(workers_of, members):
    workers, passes = workers_of(members), []
    workers.update(Weights(1, passes))
    assert passes == [1] and not workers.pool.copied
    members[0].call("signal_at", "half", KILL)
    workers.update(Weights(2, passes))
    assert passes == [1, 2, 2] and workers.pool.copied and workers.version == 2
    made = [workers.pool.submit().result(BOUND) for _ in range(4)]
    assert {version for _, version in made} == {2}
    members[0].make_ready()  # also if it was asked for nothing
    workers.update(Weights(3, passes))
    assert passes == [1, 2, 2, 3] and all(equal(each.call("held"), named(3)) for each in members)


def test_what_a_worker_held_that_was_started_again_is_done_by_those_that_have_the_weights(workers_of, members):
    first, second = members
    workers = workers_of(members)
    workers.update(Weights(1))
    first.kill()
    made = {workers.pool.submit().result(BOUND) for _ in range(6)}
    assert made == {(second.process.pid, 1)}


def test_a_run_without_a_worker_that_has_the_weights_ends_with_its_name(workers_of, members):
    workers = workers_of(members)
    workers.update(Weights(1))
    for each in members:
        each.kill()
    with pytest.raises(RolloutError, match="no rollout worker has the present weights.*worker (first|second) was st"):
        for _ in range(6):
            workers.pool.submit().result(BOUND)


def test_one_worker_alone_finds_a_copy_on_the_host(workers_of, members):
    workers = workers_of(members[:1])
    workers.update(Weights(1))
    assert workers.pool.copied and workers.pool.posted.number == 1
    members[0].kill()
    assert workers.pool.submit().result(BOUND) == (members[0].process.pid, 1)
    assert equal(members[0].call("held"), named(1))


def test_checksums_tell_order_and_value():
    own = torch.arange(1000.0)
    swapped = own.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert checksum(own) == checksum(own.clone()) != checksum(swapped)
    assert checksum(own.bfloat16()) != checksum(own) and checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize(("devices", "ahead", "said"), [(2, 0, "engine_tp_size 2"), (1, 1, "max_staleness")])
def test_what_cannot_go_from_device_to_device(devices, ahead, said, monkeypatch):
    def run(way, ahead=0):
        resources = ResourcesConfig(weight_transfer=way)
        return SimpleNamespace(
            distributed=SimpleNamespace(resources=resources), asynchronous=SimpleNamespace(ahead=ahead)
        )

    asked, auto, usual = map(run, ("device", "auto", "host"))
    assert usual == run(ResourcesConfig().weight_transfer)
    with pytest.raises(ConfigError, match=f"weight_transfer device: .*{said}.*use weight_transfer host, or auto"):
        check_transfer(run("device", ahead), devices)
    check_transfer(run("auto", ahead), devices)
    check_transfer(asked, 1)
    assert by_device(asked, 1) and not by_device(auto, 1)
    monkeypatch.setattr(device_weights, "over_cards", lambda: True)
    assert by_device(auto, 1) and not by_device(run("auto", ahead), devices) and not by_device(usual, 1)
    assert not_usual(asked.distributed.resources, OF_WORKERS) == ["weight_transfer"]  # nobody else reads it
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not by_device(auto, 1)
