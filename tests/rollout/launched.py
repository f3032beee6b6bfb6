"""Starts a script on gloo ranks, of this folder if no other is named, and waits for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forked import ranks_environment, run_on_ranks
from waiting import output_of

HERE = Path(__file__).parent


def run_ranks(
    script: str, *arguments: str, timeout: float = 260, ranks: int = 2, folder: Path = HERE, fresh: bool = False
) -> None:
    """Fails with the end of all outputs when a rank does not end well; no rank outlives the call.

    fresh: with an interpreter of its own for each rank, for scripts that must be the first to import something.
    """
    paths = [folder, HERE, HERE.parent, HERE.parent / "models", HERE.parent / "experience", HERE.parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    if fresh:
        return run_fresh_ranks(folder / script, arguments, environment, timeout, ranks)
    run_on_ranks(folder / script, arguments, environment, ranks, timeout)


def run_fresh_ranks(script: Path, arguments: tuple[str, ...], environment: dict, timeout: float, ranks: int) -> None:
    command = [sys.executable, str(script), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=own, **pipes) for own in ranks_environment(environment, ranks)]
    try:
        outputs = [output_of(process, timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, f"{codes}\n" + "\n".join(text[-3000:] for text in outputs)
