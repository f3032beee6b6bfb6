"""A run whose rollout workers are killed again and again, beside one that is left alone: all metrics must be the same.

    python scripts/kill_workers.py FOLDER [--steps 100] [--every 10] [--workers 2] [flags of examples/train_grpo_vl.py]

Every `every` seconds one worker process is ended by SIGKILL. Prints how many, and each metric that differs; the exit
code is 1 where any does, or the run does not end well. Times aside, nothing may differ: seeds name what is drawn, so
what a dead worker held is made again as it was, and a prompt that is lost or doubled shows.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[1] / "examples" / "train_grpo_vl.py"
FLAGS = (
    "--placement split --engine_type hf --eval_steps 0 --max_eval_samples 0 --report false --rollout_batch_size 8 "
    "--n_samples_per_prompt 8 --train_batch_size 64 --micro_train_batch_size 64"
)
ACTOR = "ray::_RayActor"


def workers_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The rollout workers below a run's process."""
    try:
        below = psutil.Process(run.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for process in below:
        try:
            if " ".join(process.cmdline()).startswith(ACTOR):
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(folder: Path, name: str, flags: list[str], every: float | None, workers: int) -> int:
    """Run to the end, with a worker killed every so many seconds of training; how many were."""
    with open(folder / f"{name}.log", "w") as log:
        started = subprocess.Popen(
            [sys.executable, str(SCRIPT), *flags, "--output_dir", str(folder / name)], stdout=log, stderr=log
        )
    killed, last = 0, time.monotonic()
    while started.poll() is None:
        time.sleep(0.2)
        trains = "training from step" in (folder / f"{name}.log").read_text()
        if not trains:
            last = time.monotonic()
        elif every is not None and time.monotonic() - last > every:
            found = workers_of(started)
            if found:
                found[killed % len(found)].kill()
                killed += 1
            last = time.monotonic()
    if started.returncode:
        sys.exit(f"{name} ended with {started.returncode}: {folder / name}.log")
    return killed


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without times."""
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    args, further = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    flags = [
        *FLAGS.split(), "--max_steps", str(args.steps), "--rollout_num_workers", str(args.workers),
        "--rollout_num_cpus", "0.5", *further,
    ]  # fmt: skip
    run(args.folder, "left_alone", flags, None, args.workers)
    killed = run(args.folder, "killed", flags, args.every, args.workers)
    alone, disturbed = metrics(args.folder / "left_alone"), metrics(args.folder / "killed")
    differing = [
        f"step {one['step']}: {name} {one[name]} {other.get(name)}"
        for one, other in zip(alone, disturbed)
        for name in one
        if one[name] != other.get(name)
    ]
    print(f"{killed} workers killed, {len(disturbed)} of {len(alone)} steps, {len(differing)} metrics differ")
    print("\n".join(differing[:20]))
    sys.exit(bool(differing) or len(alone) != len(disturbed) or not killed)


if __name__ == "__main__":
    main()
