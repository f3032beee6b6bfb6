"""Seconds of one training iteration of a diffusion run, split by phase.

    python scripts/bench/diffusion_step.py [--prompts 8] [--images 8] [--steps 10] [--iterations 3] [--cpu]
                                           [--json FILE] [key=value ...]

Runs Flow-GRPO on the embedded model (it is built first, where the cache does not hold it); the first iteration warms up
and does not count. Prints a table with the median and the slowest iteration: seconds of the wall, or with `--cpu` of
the processor, which other programs on the machine disturb less. `--json` writes seconds (both kinds), mean reward and
loss of every iteration. Further arguments go to the configuration:
`pretrain=... height=512 width=512` times a model of your own.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.config.load import config_or_exit
from lightrft_visual.config.spellings import DIFFUSION_PRESET

PREFIX = "time_"


def run(options: argparse.Namespace, overrides: list[str], folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv after the first."""
    samples = options.prompts * options.images
    arguments = [
        "diffusion_algorithm=flow_grpo", f"rollout_batch_size={options.prompts}",
        f"n_samples_per_prompt={options.images}", f"num_steps={options.steps}", f"train_batch_size={samples}",
        f"max_steps={options.iterations + 1}", f"output_dir={folder}", "max_eval_samples=0", "report=false",
        "save_trajectories=false", *overrides,
    ]  # fmt: skip
    config = config_or_exit(DiffusionRunConfig, arguments, preset=DIFFUSION_PRESET)
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.trainer.diffusion import build

    quiet_libraries()
    if options.cpu:
        build.PhaseTimer = partial(build.PhaseTimer, clock=time.process_time)
    trainer = build.build_diffusion_trainer(config)
    clocks = watched(trainer)
    trainer.fit()
    trainer.close()
    clocks.append((time.perf_counter(), time.process_time()))
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if options.json:
        spent = [{"wall": b[0] - a[0], "cpu": b[1] - a[1]} for a, b in zip(clocks, clocks[1:])]
        values = [{"reward": float(row["reward_mean"]), "loss": float(row["loss"])} for row in rows]
        Path(options.json).write_text(json.dumps([a | b for a, b in zip(spent, values)]))
    return rows[1:]


def watched(trainer: Any) -> list[tuple[float, float]]:
    """Wall and processor time at the start of every iteration, the trainer's `train_step`; filled by the run."""
    clocks, step = [], trainer.train_step

    def timed() -> Any:
        clocks.append((time.perf_counter(), time.process_time()))
        return step()

    trainer.train_step = timed
    return clocks


def table(rows: list[dict[str, str]]) -> str:
    """Phase, median and slowest iteration in seconds, share of the sum of medians."""
    phases = {
        name.removeprefix(PREFIX): [float(row[name] or 0) for row in rows]
        for name in rows[0]
        if name.startswith(PREFIX) and name != f"{PREFIX}step"
    }
    phases = {name: values for name, values in phases.items() if max(values) > 0}
    total = sum(statistics.median(values) for values in phases.values())
    lines = [f"{'phase':<12}{'median s':>10}{'slowest s':>11}{'share':>8}"]
    for name, values in sorted(phases.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(values)
        lines.append(f"{name:<12}{median:>10.3f}{max(values):>11.3f}{median / total:>8.0%}")
    return "\n".join([*lines, f"{'iteration':<12}{total:>10.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 8), ("images", 8), ("steps", 10), ("iterations", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options, overrides, Path(folder))
    print(f"{options.prompts} prompts x {options.images} images x {options.steps} steps")
    print(table(rows))


if __name__ == "__main__":
    main()
