"""At which port ranks meet: one rank needs none, several are told which one is taken."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

JOIN = """
import sys, torch, torch.distributed as dist
from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy
try:
    DeepspeedStrategy(DistributedConfig(collective_timeout=60)).setup_distributed()
except ConfigError as error:
    sys.exit(f"refused: {error}")
found = torch.ones(1)
dist.all_reduce(found)
group = dist.new_group([0])
print("joined", dist.get_world_size(), found.item(), flush=True)
input()
"""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def start(port: int, ranks: int) -> subprocess.Popen:
    """Rank 0, as `deepspeed` starts it."""
    known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | known | {"MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, "-c", JOIN], env=environment, text=True, **pipes)


def test_two_runs_of_one_rank_start_at_the_same_taken_port(taken):
    runs = [start(taken, 1) for _ in range(2)]
    for each in runs:
        lines = iter(each.stdout.readline, "")
        assert next((line for line in lines if line.startswith("joined")), None) == "joined 1 1.0\n", each.stderr.read()
    for each in runs:
        each.communicate("\n", timeout=60)
        assert each.returncode == 0


def test_several_ranks_at_a_taken_port_are_told_which_and_what_to_do(taken):
    told = start(taken, 2).communicate(timeout=500)[1]  # a first start compiles before
    assert f"refused: port {taken} of this host" in told and "deepspeed --master_port PORT" in told, told[-2000:]
