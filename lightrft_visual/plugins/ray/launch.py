"""A run's ranks started by Ray Train, for those who have a Ray cluster and no `deepspeed` launcher on its hosts.

    python -m lightrft_visual.plugins.ray.launch --ranks 4 examples/train_grpo_vl.py --pretrain /models/qwen ...

Each rank is a process of its own, as `deepspeed` would start it, beside a worker of `ray.train.torch.TorchTrainer`,
which gives it its number, its devices and the address at which the ranks meet. Script, checkpoint and data must lie
under the same paths on all hosts.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

from ...errors import ConfigError
from ...runtime.host_memory import free_port
from .cluster import connect, process_environment

TOKENS = re.compile(r"token_env[ =](\w+)")  # how arguments name the variable of a token


def start_rank(run: dict[str, Any]) -> None:
    """In a worker of Ray Train: run the script as this rank, until it ends. Raises RuntimeError for an exit code.

    run: command (list of str), folder to run in, and the address of the cluster.
    """
    import ray
    from ray.train import get_context

    from ...runtime import collectives  # with torch, which the launching process does without
    from ...runtime.presence import STARTED_BY

    context = get_context()
    # the workers' own port is taken by them
    host, port = collectives.broadcast_object((ray.util.get_node_ip_address(), free_port()))
    rank = context.get_world_rank()
    own = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RAY_ADDRESS": run["address"],  # rollouts and rewards of the run use the same cluster
        STARTED_BY: os.getpid(),  # where this worker is gone and Ray leaves the rank alone, it ends after its step
    }
    environment = os.environ | {name: str(value) for name, value in own.items()}
    code = subprocess.run([sys.executable, *run["command"]], cwd=run["folder"], env=environment).returncode
    if code:
        raise RuntimeError(f"rank {rank} ended with exit code {code}; its output says why")


def _launch(command: list[str], ranks: int | None = None, cpus: float = 1.0) -> None:
    """Run a script, with its arguments, on `ranks` ranks, by default one for each GPU of the cluster, or one.

    cpus: cores that Ray reserves for each rank. Raises ConfigError without Ray Train, or for more ranks than GPUs or
    cores; ray.train's TrainingFailedError where a rank fails.
    """
    ray = connect("launch_ray", cpus=None if ranks is None else max(os.cpu_count() or 1, ranks * cpus), logs=True)
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # else the first versions that have it are the older ones
    try:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ConfigError(f"launch_ray needs Ray Train: pip install 'ray[train]' ({error})") from error

    found = ray.cluster_resources()
    gpus, cores = int(found.get("GPU", 0)), found.get("CPU", 0)
    ranks = ranks or gpus or 1
    if 0 < gpus < ranks:
        raise ConfigError(f"{ranks} ranks were asked for, the Ray cluster has {gpus} GPU(s)")
    if cores < ranks * cpus:  # Ray Train would wait for them for ever
        raise ConfigError(
            f"{ranks} ranks of {cpus:g} CPU were asked for, the Ray cluster has {cores:g}: --cpus_per_rank says "
            "how many Ray reserves for each"
        )
    reserved = {"CPU": cpus} | ({"GPU": 1} if gpus else {})
    run = {"command": command, "folder": os.getcwd(), "address": ray.get_runtime_context().gcs_address}
    TorchTrainer(
        start_rank,
        train_loop_config=run,
        torch_config=TorchConfig(backend="gloo"),  # the workers only tell each other where the ranks meet
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpus > 0, resources_per_worker=reserved),
        run_config=RunConfig(
            storage_path=os.path.join(tempfile.gettempdir(), "lightrft_visual_ray"),
            worker_runtime_env=environment_of_ranks(command),
        ),
    ).fit()


def environment_of_ranks(command: list[str]) -> dict[str, Any]:
    """Ray's runtime_env of the ranks: that of other workers, Weights & Biases' variables, and the tokens that the
    command names."""
    tokens = TOKENS.findall(" ".join(command))
    own = {name: value for name, value in os.environ.items() if name.startswith("WANDB_") or name in tokens}
    return process_environment(**own)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it is 1 or more")
    return number


def main() -> None:
    """Exit code 1 where a rank fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_positive, help="default: one for each GPU of the cluster, else one")
    parser.add_argument("--cpus_per_rank", type=float, default=1.0, help="cores that Ray reserves for each")
    parser.add_argument("script", help="such as examples/train_grpo_vl.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    asked = parser.parse_args()
    try:
        _launch([asked.script, *asked.arguments], asked.ranks, asked.cpus_per_rank)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
