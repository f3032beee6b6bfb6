"""Step times with rollouts ahead of the trainer, where engine and trainer sleep for a stated time (stand_ins.py).

    python scripts/bench/async_steps.py FOLDER [--generate 1.0] [--train 1.0] [--steps 12] [--staleness 0 1 2]

Prints the median step time of each run, after the first steps, beside the longer one of the two times.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "--placement split --engine_type sleeping --policy_loss sleeping --eval_steps 0 --max_eval_samples 0 "
    "--report false --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 16 "
    "--parity_every 0 --image_dependence_every 0 --save_steps 0"
)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--generate", type=float, default=1.0)
    parser.add_argument("--train", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    args, further = parser.parse_known_args()
    times = {"LIGHTRFT_GENERATE_SECONDS": str(args.generate), "LIGHTRFT_TRAIN_SECONDS": str(args.train)}
    args.folder.mkdir(parents=True, exist_ok=True)
    longer = max(args.generate, args.train)
    for staleness in args.staleness:
        folder = args.folder / f"k{staleness}"
        command = [
            sys.executable, str(HERE.parents[1] / "examples" / "train_grpo_vl.py"), *FLAGS.split(),
            "--plugins", str(HERE / "stand_ins.py"), "--max_steps", str(args.steps), "--output_dir", str(folder),
            f"async.max_staleness={staleness}", *further,
        ]  # fmt: skip
        with open(args.folder / f"k{staleness}.log", "w") as log:
            subprocess.run(command, env=os.environ | times, stdout=log, stderr=log, check=True)
        with open(folder / "metrics.csv") as file:
            rows = list(csv.DictReader(file))[3 : -staleness or None]
        step = statistics.median(float(row["time_step"]) for row in rows)
        idle = statistics.median(float(row.get("idle_engines") or "nan") for row in rows)
        print(f"k = {staleness}: {step:.2f} s a step, {step / longer:.2f} x the longer one; engines idle {idle:.2f}")


if __name__ == "__main__":
    main()
