"""Seconds of a whole training step, by phase: 8 prompts x 8 completions x 32 tokens, one 56x56 image a prompt.

    OMP_NUM_THREADS=2 python scripts/bench/step_time.py [--steps 30] [--profile FILE] [flag of the examples ...]

Medians over the steps after a warm-up of three, on the embedded model and its data. Responses have 32 tokens exactly:
no end token is drawn before. Unknown arguments go to the run, such as --packing_samples true.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WARM_UP = 3
PHASES = ("generate", "reward", "forward", "train", "sync")
FLAGS = (
    "--rollout_batch_size 8 --n_samples_per_prompt 8 --micro_rollout_batch_size 64 --generate_max_len 32 "
    "--min_new_tokens 32 --train_batch_size 64 --micro_train_batch_size 64 --max_eval_samples 0 --report false "
    "--save_trajectories false --logging_steps 1000000"
).split()


def medians(path: Path) -> dict[str, float]:
    """{phase, "other" or "step": median seconds}"""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[WARM_UP:]
    steps = [{name: float(row.get(f"time_{name}") or 0) for name in ("step", *PHASES)} for row in rows]
    for each in steps:
        each["other"] = each["step"] - sum(each[name] for name in PHASES)
    return {name: statistics.median(each[name] for each in steps) for name in steps[0]}


def show(figures: dict[str, float]) -> None:
    print("| phase | median s |\n|---|---|")
    for name in (*PHASES, "other"):
        print(f"| {name} | {figures[name]:.3f} |")
    print(f"| **step** | **{figures['step']:.3f}** |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", type=Path, help="write cProfile's figures of the loop to this file")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    arguments, rest = parser.parse_known_args()

    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.runtime.host_memory import bound_spinning

    quiet_libraries()
    bound_spinning()
    from lightrft_visual.trainer.vl.trainer import build_trainer

    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, "--max_steps", str(arguments.steps + WARM_UP), "--output_dir", folder, *rest]
        trainer = build_trainer(load_config(RunConfig, flags))
        profiler = cProfile.Profile()
        profiler.enable() if arguments.profile else None
        trainer.fit()
        if arguments.profile:
            profiler.disable()
            profiler.dump_stats(arguments.profile)
        trainer.close()
        figures = medians(Path(folder) / "metrics.csv")
        show(figures)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
