"""How a process speaks to the Ray cluster of its run; a cluster itself is in the tests of those who use one."""

import os
import shutil
import socket
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.ray.cluster import connect
from lightrft_visual.plugins.ray.rollout.worker import EngineSpec, Worker
from lightrft_visual.runtime.host_memory import free_port


def test_a_rank_speaks_to_the_cluster_as_the_rank_that_started_it(monkeypatch):
    context = SimpleNamespace(gcs_address="host:1")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {})
    for mode, held in ((None, {}), ("token", {"RAY_AUTH_MODE": "token"}), ("disabled", {"RAY_AUTH_MODE": "token"})):
        connect("rewards", address="host:1", authentication=mode)
        assert os.environ == held  # of a cluster that asks for nothing; what is set stays


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_an_address_where_nobody_listens_is_an_error_at_once(monkeypatch, form):
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: 1 / 0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    address = form.format(f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"placement split: no Ray cluster answers at {address} .*Connection refused"):
        connect("placement split")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:63790000")
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        connect("placement split")


@pytest.mark.parametrize(
    ("cpus", "free", "given"),
    [(0.4, 2**36, {"num_cpus": 1}), (2.5, 2**30, {"num_cpus": 3, "object_store_memory": 256 * 2**20})],
)
def test_a_cluster_started_here_has_room_for_all_that_it_is_started_for(monkeypatch, cpus, free, given):
    started = []
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **settings: started.append(settings))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    connect("placement split", cpus=cpus)
    names = ("num_cpus", "object_store_memory")
    assert {name: started[0][name] for name in names if started[0].get(name) is not None} == given


def test_a_worker_beside_a_rank_of_torchrun_makes_a_store_of_its_own(monkeypatch):
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.setattr(os, "environ", dict(os.environ) | ranks)
    asked = []
    monkeypatch.setattr(
        import_module("torch.distributed.rendezvous"),
        "TCPStore",
        lambda **settings: asked.append(settings["is_master"]),
    )
    worker = Worker(EngineSpec("torch.distributed.rendezvous:rendezvous", ("env://",), torch.get_num_threads()))
    assert next(worker.engine)[1:] == (0, 1) and asked == [True]


def test_addresses_that_ray_itself_reads_are_left_to_it(monkeypatch):
    asked = []
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda address, **_: asked.append(address))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    connect("placement split")
    assert asked == [None]  # which is RAY_ADDRESS to it


def test_something_else_that_listens_is_given_up_after_two_tries(monkeypatch):
    tries = []

    def init(**_):
        tries.append(os.environ["RAY_gcs_server_port_wait_time_s"])
        raise RuntimeError(
            "Failed to connect to GCS. Last connection error: Traceback ...\n  a line\nTimedOut: no GCS\n"
        )

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.delenv("RAY_gcs_server_port_wait_time_s", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(ConfigError, match="does not answer: TimedOut: no GCS$"):
            connect("placement split")
        assert "RAY_gcs_server_port_wait_time_s" not in os.environ
        monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "90")
        with pytest.raises(ConfigError):
            connect("placement split")
    assert tries == ["2", "90"] and os.environ["RAY_gcs_server_port_wait_time_s"] == "90"


def test_a_process_of_another_cluster_is_told_what_to_do(monkeypatch):
    context = SimpleNamespace(gcs_address="here:1")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert connect("placement split") is connect("placement split", address="here:1") is ray
    with pytest.raises(ConfigError, match="needs the Ray cluster at there:2, but this process is connected to here:1"):
        connect("placement split", address="there:2")
