"""A run's settings of its host: OpenMP's, which test_start_up.py sees at work; its cores; malloc's."""

import os
import platform
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.runtime import deepspeed as deepspeed_strategy
from lightrft_visual.runtime.host_memory import bound_spinning


def test_what_the_user_set_of_openmp_stays(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    bound_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    bound_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_ranks_share_the_hosts_cores_whatever_the_accelerator_is(monkeypatch, kind):
    chosen = []
    accelerator = SimpleNamespace(
        device_name=lambda: kind, set_device=lambda index: None, communication_backend_name=lambda: "nccl"
    )
    monkeypatch.setattr(deepspeed_strategy, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(deepspeed_strategy.deepspeed, "init_distributed", lambda **arguments: None)
    monkeypatch.setattr(deepspeed_strategy, "seed_everything", lambda *arguments: None)
    monkeypatch.setattr(deepspeed_strategy.watchdog, "start", lambda limit: None)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    deepspeed_strategy.DeepspeedStrategy(DistributedConfig()).setup_distributed()
    assert chosen == [2]


@pytest.mark.parametrize(
    ("launched", "chosen", "taken"),
    [({}, 3, 3), ({"LOCAL_RANK": "1"}, 3, 3), ({}, None, 0), (dict(RANK="0", LOCAL_RANK="1"), 3, 1)],
)
def test_a_run_of_one_rank_stays_on_the_device_that_the_program_has_chosen(monkeypatch, launched, chosen, taken):
    class Joined(Exception):
        pass

    def joined(*arguments):
        raise Joined

    devices = []
    accelerator = SimpleNamespace(device_name=lambda: "cuda", set_device=devices.append)
    monkeypatch.setattr(deepspeed_strategy, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(deepspeed_strategy, "device_here", lambda: chosen)
    monkeypatch.setattr(deepspeed_strategy, "join", joined)
    for name in deepspeed_strategy.ALONE:
        monkeypatch.setenv(name, "")
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Joined):
        deepspeed_strategy.DeepspeedStrategy(DistributedConfig()).setup_distributed()
    assert devices == [taken] and os.environ["LOCAL_RANK"] == str(taken)
    monkeypatch.setattr(deepspeed_strategy, "device_here", lambda: 2)  # a second run of the same program
    with pytest.raises(Joined):
        deepspeed_strategy.DeepspeedStrategy(DistributedConfig()).setup_distributed()
    assert devices[1:] == [taken if "RANK" in launched else 2]


@pytest.mark.parametrize("ranks", [1, 8])
def test_ranks_on_the_cpu_start_without_collectives_over_shared_memory(monkeypatch, ranks):
    seen, ops = [], deepspeed_strategy.deepspeed.ops.__compatible_ops__
    begin = lambda **arguments: seen.append(ops["deepspeed_shm_comm"])  # noqa: E731
    monkeypatch.setattr(deepspeed_strategy.deepspeed, "init_distributed", begin)
    monkeypatch.setattr(deepspeed_strategy.dist, "is_initialized", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    deepspeed_strategy.join(SimpleNamespace(device_name=lambda: "cpu"), timedelta(seconds=1))
    assert seen == [False]


PROGRAM = """
import resource, sys
import numpy
if sys.argv[1] == "kept":
    from lightrft_visual.runtime.host_memory import keep_freed_memory
    keep_freed_memory()

def several():  # 48 MiB in blocks of 8, as the tensors of a forward and of its backward
    return [numpy.ones(2**20) for _ in range(6)]

several()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    several()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's settings are glibc's")


def pages_faulted(kind: str, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = [sys.executable, "-c", PROGRAM, kind]
    return int(subprocess.run(run, env=inherited | environment, capture_output=True, text=True, check=True).stdout)


@glibc
def test_blocks_that_were_freed_are_used_again():
    given_back = pages_faulted("plain")
    assert given_back > 2_000  # 36,864 pages of 4 KiB, fewer where the system hands out larger ones
    assert pages_faulted("kept") < given_back / 20


@glibc
def test_mallocs_settings_of_the_user_stay():
    assert pages_faulted("kept", MALLOC_TRIM_THRESHOLD_="131072") > 2_000


GIVEN_BACK = """
import numpy
from lightrft_visual.runtime.host_memory import give_back_freed_memory, keep_freed_memory

def filled():  # MiB
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024

keep_freed_memory()
blocks = [numpy.ones(2**17) for _ in range(128)]  # 1 MiB each
left = blocks[::2]
del blocks
before = filled()
print(give_back_freed_memory(31 * 2**20), before - filled(), give_back_freed_memory(64 * 2**20), before - filled())
"""


@glibc
def test_memory_between_blocks_that_stay_goes_back_where_it_is_worth_it():
    told = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == "False" and int(told[1]) < 4
    assert told[2] == "True" and int(told[3]) > 48
