"""Starts a script of this folder on two gloo ranks and waits for both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from waiting import output_of

HERE = Path(__file__).parent


def run_ranks(script: str, *arguments: str, timeout: float = 260) -> None:
    """Fails with the end of both outputs when a rank does not end well; no rank outlives the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [HERE, HERE.parent / "models", HERE.parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [output_of(process, timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(text[-3000:] for text in outputs)
