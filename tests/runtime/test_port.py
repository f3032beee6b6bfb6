"""At which port ranks meet: one rank needs none, several are told which one is taken, and when not all come."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_work, together
from waiting import polls

from lightrft_visual.config.vl import DistributedConfig
from lightrft_visual.errors import ConfigError, LightRFTVisualError
from lightrft_visual.runtime import deepspeed as runtime
from lightrft_visual.runtime.deepspeed import ALONE, DeepspeedStrategy, OptimizerSettings
from lightrft_visual.runtime.host_memory import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def join(folder: str, runs: int, seconds: int = 60) -> str:
    """What the first rank finds, or is told; it stays until as many runs have joined."""
    try:
        DeepspeedStrategy(DistributedConfig(collective_timeout=seconds)).setup_distributed()
    except LightRFTVisualError as error:
        return f"{'' if isinstance(error, ConfigError) else 'late: '}{error}"
    found = torch.ones(1)
    dist.all_reduce(found)
    dist.new_group([0])
    Path(folder, f"{os.getpid()}.joined").touch()
    assert any(len(list(Path(folder).glob("*.joined"))) == runs for _ in polls(120))
    return f"joined {dist.get_world_size()} {found.item()}"


def first_ranks(port: int, ranks: int, runs: int, folder: Path) -> list[str]:
    """What rank 0 of each run says, which all begin at this port."""
    known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | known | {"MASTER_PORT": str(port)}
    results = [str(folder / str(run)) for run in range(runs)]
    together(run_work, [(join, (str(folder), runs), result, environment) for result in results], 260)
    return [torch.load(result) for result in results]


def test_two_runs_of_one_rank_start_at_the_same_taken_port(taken, tmp_path):
    assert first_ranks(taken, 1, 2, tmp_path) == ["joined 1 1.0"] * 2


@pytest.mark.parametrize("told", [{"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}])
def test_one_rank_whose_launcher_says_no_more_starts_alone(told, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in (*ALONE, "MASTER_PORT")} | told
    result = str(tmp_path / "result")
    together(run_work, [(join, (str(tmp_path), 1), result, environment)], 260)
    assert torch.load(result) == "joined 1 1.0"


def warned() -> list[str]:
    handler, texts = logging.Handler(), []
    handler.emit = lambda record: texts.append(record.getMessage())
    runtime.logger.addHandler(handler)
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    try:
        strategy.prepare(torch.nn.Linear(2, 2), OptimizerSettings(1e-2, total_steps=1))
        strategy.prepare_inference(torch.nn.Linear(2, 2))
    except AssertionError as error:
        texts.append(str(error))
    return texts


@pytest.fixture(scope="module")
def told_to_tasks(tmp_path_factory) -> dict[str, list[str]]:
    """What processes are told whose variables are of srun or mpirun, and maybe of a launcher."""
    folder = tmp_path_factory.mktemp("tasks")
    environment = {name: value for name, value in os.environ.items() if name not in (*ALONE, "MASTER_PORT")}
    open_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    ranked = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    cases = {"srun": {"SLURM_STEP_NUM_TASKS": "2"}, "mpirun": open_mpi, "ranked": open_mpi | ranked}
    cases["one"] = {"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "abc"}
    together(run_work, [(warned, (), str(folder / name), environment | told) for name, told in cases.items()], 260)
    return {name: torch.load(folder / name) for name in cases}


@pytest.mark.parametrize("case", ["srun", "mpirun"])
def test_tasks_without_a_launcher_are_told_that_each_is_a_run_of_its_own(told_to_tasks, case):
    (told,) = told_to_tasks[case]
    assert "is 2 without RANK: each of these tasks is a run of one rank" in told


@pytest.mark.parametrize("case", ["one", "ranked"])
def test_a_task_alone_or_of_a_launcher_trains_unwarned_whatever_open_mpi_says(told_to_tasks, case):
    assert told_to_tasks[case] == []


def test_several_ranks_at_a_taken_port_are_told_which_and_what_to_do(taken, tmp_path):
    (told,) = first_ranks(taken, 2, 1, tmp_path)
    assert told.startswith(f"port {taken} of this host") and "deepspeed --master_port PORT" in told


def test_a_rank_whose_others_do_not_come_says_so_and_signals_end_it_while_it_waits(tmp_path):
    known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    result = str(tmp_path / "result")
    environment = os.environ | known | {"MASTER_PORT": str(free_port())}
    together(run_work, [(join, (str(tmp_path), 1, 2), result, environment)], 260)
    assert torch.load(result).startswith("late: not all 2 ranks came to 127.0.0.1:") and "2 s (coll" in torch.load(
        result
    )
    code = (
        "import signal\nfor n in (1, 15): signal.signal(n, lambda *_: print('never'))\n"
        "from lightrft_visual.config.vl import DistributedConfig\n"
        "from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, deepspeed\n"
        "own = deepspeed.init_distributed\n"
        "def told(**settings):\n    print('waits', flush=True)\n    own(**settings)\n"
        "deepspeed.init_distributed = told\n"
        "DeepspeedStrategy(DistributedConfig(collective_timeout=250)).setup_distributed()\n"
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        environment["MASTER_PORT"] = str(free_port())
        line = [sys.executable, "-c", code]
        with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as waiting:
            assert any(line.startswith("waits") for line in waiting.stdout)
            waiting.send_signal(number)
            assert waiting.wait(200) == -number
