"""Starts a script on gloo ranks, of this folder if no other is named, and waits for all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from waiting import output_of

HERE = Path(__file__).parent


def run_ranks(script: str, *arguments: str, timeout: float = 260, ranks: int = 2, folder: Path = HERE) -> None:
    """Fails with the end of both outputs when a rank does not end well; no rank outlives the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [folder, HERE, HERE.parent, HERE.parent / "models", HERE.parent / "experience", HERE.parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / script), *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [output_of(process, timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, f"{codes}\n" + "\n".join(text[-3000:] for text in outputs)


def leave() -> None:
    """Ends a rank's script in order: with a process group the end of the interpreter aborts at times."""
    if dist.is_initialized():
        dist.destroy_process_group()
