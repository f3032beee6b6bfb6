"""Scripts on several ranks, in processes that have everything imported when they begin.

Most of a short run's time would be imports. A rank is a child of a server that has made them once for all tests of a
process; it has the environment, the arguments and the output of a program that was started for the script.
"""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil
import torch
import torch.multiprocessing
from waiting import polls

from lightrft_visual.runtime import watchdog
from lightrft_visual.runtime.deepspeed import DeepspeedStrategy
from lightrft_visual.runtime.host_memory import free_port
from lightrft_visual.trainer import loop

PRELOADED = [
    "forked",
    "lightrft_visual.trainer.vl.trainer",
    "lightrft_visual.trainer.diffusion.build",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported with every optimizer; brings torch's compiler along
]
GRACE = 10.0  # seconds in which the other ranks may still say why, when one has failed


def server() -> ForkServerContext:
    """The context whose processes begin with what is PRELOADED."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def spawn(work: Callable[..., None], ranks: int, *arguments: object) -> None:
    """work(rank, *arguments) in as many processes; its first error is raised."""
    server()
    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


def ranks_environment(environment: dict[str, str], ranks: int) -> list[dict[str, str]]:
    """What a launcher gives each of the ranks of one host."""
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": free_port()}
    shared = environment | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in world.items()}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def divide_again_after_use() -> None:
    """Under ZeRO-3, as large models do. DeepSpeed never divides weights as small (1e5 numbers) as those of a tiny one,
    which also lies within the distance (1e9 numbers) in which it looks for a weight's next use before it divides it."""
    base = DeepspeedStrategy._base_config
    apart = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    DeepspeedStrategy._base_config = lambda self, zero: base(self, zero | apart)


def leave_imports_alone() -> None:
    """What a new process has imported is not looked through by collections of its garbage: the end of `fit` would undo
    that, for a second of each later run's start."""
    gc.freeze()
    loop.start_up_objects_aside = nullcontext


def begin(environment: dict[str, str], log: str) -> None:
    """In the new process."""
    leave_imports_alone()
    divide_again_after_use()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))


def run_script(script: str, arguments: Sequence[str], environment: dict[str, str], log: str) -> None:
    """In the new process."""
    begin(environment, log)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(script, run_name="__main__")


def run_work(work: Callable, arguments: tuple, result: str, environment: dict[str, str], log: str) -> None:
    """In the new process."""
    begin(environment, log)
    torch.save(work(*arguments), result)
    leave()


def leave() -> None:
    """Ends a rank, and its process: the end of an interpreter aborts at times where there was a process group, even
    one that is destroyed ("terminate called without an active exception"). Before, it goes in order: a child of the
    fork server, which runs nothing at its exit, would count as gone to a rank that is slower."""
    watchdog.stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def on_ranks(work: Callable, *arguments: object, ranks: int = 2, limit: float = 260) -> list:
    """What a function of a module, such as a test's, gives on each of the ranks. Fails and ends as `run_on_ranks`."""
    environments = ranks_environment(os.environ | {"OMP_NUM_THREADS": "1"}, ranks)
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, str(rank))) for rank in range(ranks)]
        together(run_work, [(work, arguments, file, own) for file, own in zip(files, environments)], limit)
        return [torch.load(file, weights_only=False) for file in files]


def run_alone(script: Path, *arguments: object, limit: float, **environment: str) -> str:
    """What a script has said that is no rank of a launcher, when it has ended well; else AssertionError."""
    return run_together(script, [str(each) for each in arguments], [os.environ | environment], limit)


def run_on_ranks(script: Path, arguments: Sequence[str], environment: dict[str, str], ranks: int, limit: float) -> str:
    """What all ranks have said, when they have ended well. AssertionError where one has not, or after the limit.

    Args:
        environment: of all ranks, beside what a launcher gives them.
        limit: seconds.
    """
    return run_together(script, arguments, ranks_environment(environment, ranks), limit)


def run_together(script: Path, arguments: Sequence[str], environments: Sequence[dict[str, str]], limit: float) -> str:
    """The script in as many processes as environments."""
    return together(run_script, [(str(script), list(arguments), dict(own)) for own in environments], limit)


def together(target: Callable, given: Sequence[tuple], limit: float) -> str:
    """target(*given, log) in as many processes: what they have said. AssertionError as of `run_on_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{number}.log") for number in range(len(given))]
        begun = [server().Process(target=target, args=(*own, str(log))) for log, own in zip(logs, given)]
        for each in begun:
            each.start()
        codes = wait_for(begun, limit)
        told = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    assert not any(codes), f"{codes}\n" + "\n".join(text[-6000 // len(told) :] for text in told)
    return "".join(told)


def wait_for(begun: Sequence, limit: float) -> list[int]:
    """Exit codes of processes, none of which is left: they are killed after the limit, or soon after one has failed."""
    try:
        for _ in polls(limit, 0.05):
            if all(each.exitcode is not None for each in begun) or any(each.exitcode for each in begun):
                break
        for _ in polls(GRACE):
            if all(each.exitcode is not None for each in begun):
                break
        else:
            show_stacks(begun)
        return [-9 if each.exitcode is None else each.exitcode for each in begun]
    finally:
        end(begun)


def show_stacks(processes: Sequence) -> None:
    """Let those that still run write where they are."""
    for each in processes:
        if each.exitcode is None:
            os.kill(each.pid, signal.SIGUSR1)
    time.sleep(1.0)


def end(processes: Sequence) -> None:
    """With all that they have started."""
    for each in processes:
        if each.exitcode is None:
            for child in psutil.Process(each.pid).children(recursive=True):
                child.kill()
        each.kill()
        each.join()
