"""Two hosts with a rank each do what two ranks of one host do: torchrun on both, and nothing shared but the disk."""

import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Host, refusal, two_hosts
from plans import TWO_RANKS
from waiting import output_of
from whole_runs import EXAMPLE, ROOT, environment, kill_tree, rollouts, rows, weights

LIMIT = 400.0
RUN = "stage_2"


def node(number: int, host: Host, first: Host, flags: list[str], cache: Path) -> subprocess.Popen:
    words = (
        f"{Path(sys.executable).parent}/torchrun --nnodes 2 --nproc-per-node 1 --node-rank {number} "
        f"--master-addr {first.address} --master-port 29400 {EXAMPLE}"
    )
    return subprocess.Popen(
        host.command([*words.split(), *flags]),
        env=environment(cache) | {"GLOO_SOCKET_IFNAME": host.interface},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_two_hosts(tmp_path_factory, cache_root) -> Path:
    why = refusal()
    if why is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("two_hosts") / "run"
    flags = [*TWO_RANKS[RUN], "--output_dir", str(folder)]
    with two_hosts() as hosts:
        nodes = [node(number, host, hosts[0], flags, cache_root) for number, host in enumerate(hosts)]
        try:
            told = [output_of(each, LIMIT)[0] for each in nodes]
        finally:
            for each in nodes:
                kill_tree(each)
    for each, output in zip(nodes, told):
        assert each.returncode == 0, output[-4000:]
    return folder


def test_two_hosts_train_as_one(on_two_hosts, two_ranks):
    assert rows(on_two_hosts) == rows(two_ranks / RUN)
    assert rows(on_two_hosts, "eval_metrics.csv") == rows(two_ranks / RUN, "eval_metrics.csv")
    assert rollouts(on_two_hosts) == rollouts(two_ranks / RUN)
    assert weights(on_two_hosts) == weights(two_ranks / RUN)
