"""What a run of one step takes, the launcher and all, beside an older version of this project.

    python scripts/bench/startup.py [--before CHECKOUT [--before_python PYTHON]] [--rounds 3] [--threads 2]

CHECKOUT: a folder with the older version, such as `git worktree add /tmp/first ebf6c37` makes; both use the Python that
runs this, or the older version PYTHON, of an environment of its own: such as its own set-up made it, without compiled
bytecode of its libraries where PYTHONDONTWRITEBYTECODE is set; today's set-up compiles it. Each side has an embedded
cache of its own, in FOLDER/cache-*, which an uncounted run fills. Versions alternate. Prints a markdown table:
CPU seconds (user and system) of all processes together, which a busy machine disturbs least, wall time of the command,
and seconds until its first line and until the line of the first step; then the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

COMMAND = ["examples/train_grpo_vl.py", "--max_steps", "1", "--max_eval_samples", "8"]


@dataclass(frozen=True)
class Taken:
    """Seconds of one run."""

    cpu: float
    wall: float
    first_line: float
    first_step: float


def cpu_of_children() -> float:
    """User and system seconds of all processes that were waited for so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(checkout: Path, folder: Path, threads: int, python: Path) -> Taken:
    """One run in a checkout. Raises SystemExit with its last lines where it fails."""
    environment = dict(os.environ, PYTHONPATH=str(checkout), OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1")
    environment["LIGHTRFT_CACHE"] = str(folder / f"cache-{checkout.name}")
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    output = ["--output_dir", tempfile.mkdtemp(dir=folder)]
    command = ["deepspeed", "--master_port", str(free_port()), *COMMAND, *output]
    lines, first_line, first_step = [], 0.0, 0.0
    before, began = cpu_of_children(), time.perf_counter()
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            now = time.perf_counter() - began
            first_line = first_line or now
            if line.startswith("step 1/1"):
                first_step = now
            lines.append(line)
    wall = time.perf_counter() - began
    if process.returncode or not first_step:
        raise SystemExit(f"the run in {checkout} failed:\n{''.join(lines[-20:])}")
    return Taken(cpu_of_children() - before, wall, first_line, first_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--before_python", type=Path, default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for caches and outputs; default a new one below /tmp")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="startup-"))
    folder.mkdir(parents=True, exist_ok=True)
    now = Path(__file__).resolve().parents[2]
    checkouts = [now] if arguments.before is None else [arguments.before.resolve(), now]
    pythons = {checkouts[0]: Path(arguments.before_python), now: Path(sys.executable)}
    for checkout in checkouts:
        run(checkout, folder, arguments.threads, pythons[checkout])
    taken: dict[Path, list[Taken]] = {checkout: [] for checkout in checkouts}
    print("| version | CPU s | wall s | first line after s | first step after s |\n|---|---|---|---|---|")
    for _ in range(arguments.rounds):
        for checkout in checkouts:
            one = run(checkout, folder, arguments.threads, pythons[checkout])
            taken[checkout].append(one)
            row = " | ".join(f"{value:.1f}" for value in (one.cpu, one.wall, one.first_line, one.first_step))
            print(f"| {checkout.name} | {row} |", flush=True)
    if len(checkouts) == 2:
        cpu, wall = (
            [statistics.median(getattr(one, name) for one in taken[checkout]) for checkout in checkouts]
            for name in ("cpu", "wall")
        )
        print(f"\nCPU {cpu[1] / cpu[0]:.2f}, wall {wall[1] / wall[0]:.2f} of {checkouts[0].name}")


if __name__ == "__main__":
    main()
