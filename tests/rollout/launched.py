"""Starts a script on gloo ranks with interpreters of their own, for what must be the first to import something."""

import os
import subprocess
import sys
from pathlib import Path

from forked import ranks_environment
from waiting import output_of

TESTS = Path(__file__).parents[1]


def run_ranks(script: Path, *arguments: str, timeout: float = 260, ranks: int = 2) -> None:
    """Fails with the end of all outputs when a rank does not end well; no rank outlives the call."""
    paths = [script.parent, TESTS / "rollout", TESTS, TESTS / "models", TESTS / "experience", TESTS.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
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
