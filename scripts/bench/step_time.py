"""Seconds of a whole training step of the embedded models, by phase.

    OMP_NUM_THREADS=2 python scripts/bench/step_time.py vl|drawing [--steps N] [--cpu] [--json FILE]
        [flag of the examples ...]

vl: GRPO of 8 prompts x 8 completions x 32 tokens exactly, one 56x56 image a prompt; 30 steps after a warm-up of 3.
drawing: Flow-GRPO of 8 prompts x 8 images x 10 denoising steps; 3 steps after a warm-up of 1. Prints medians and the
slowest: seconds of the wall, or with --cpu of the processor, which other programs on the machine disturb less. --json:
the medians, and seconds (both kinds), reward and loss of every step, warm-up included. No step saves. Unknown
arguments go to the run:
`--packing_samples true`, or `--pretrain ... --height 512 --width 512` for a model of your own.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightrft_visual.runtime.files import read_jsonl  # noqa: E402

COMMON = (
    "--rollout_batch_size 8 --n_samples_per_prompt 8 --train_batch_size 64 --max_eval_samples 0 --report false "
    "--save_trajectories false --logging_steps 1000000 --save_steps -1"
).split()
FLAGS = {
    "vl": "--micro_rollout_batch_size 64 --generate_max_len 32 --min_new_tokens 32 --micro_train_batch_size 64".split(),
    "drawing": "--diffusion_algorithm flow_grpo --num_steps 10".split(),
}
STEPS, WARM_UP = {"vl": 30, "drawing": 3}, {"vl": 3, "drawing": 1}


def trainer_of(kind: str, flags: list[str], cpu: bool) -> Any:
    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import config_or_exit
    from lightrft_visual.config.spellings import DIFFUSION_PRESET, VL_PRESET
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.runtime.host_memory import bound_spinning

    quiet_libraries()
    bound_spinning()
    from lightrft_visual.trainer import start
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
    from lightrft_visual.trainer.vl.trainer import build_trainer

    if cpu:
        start.PhaseTimer = partial(start.PhaseTimer, clock=time.process_time)
    if kind == "vl":
        return build_trainer(config_or_exit(RunConfig, flags, preset=VL_PRESET))
    return build_diffusion_trainer(config_or_exit(DiffusionRunConfig, flags, preset=DIFFUSION_PRESET))


def watched(trainer: Any) -> list[tuple[float, float]]:
    """Wall and processor time at the start of every step; filled by the run."""
    clocks, step = [], trainer.train_step

    def timed() -> Any:
        clocks.append((time.perf_counter(), time.process_time()))
        return step()

    trainer.train_step = timed
    return clocks


def phases(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """{phase, "other" or "step": seconds in each step}, phases without any left out."""
    names = [name.removeprefix("time_") for name in rows[0] if name.startswith("time_")]
    found = {name: [row.get(f"time_{name}", 0.0) for row in rows] for name in names}
    whole = found.pop("step")
    found = {name: values for name, values in found.items() if max(values) > 0}
    return found | {"other": [step - sum(parts) for step, *parts in zip(whole, *found.values())], "step": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLAGS)
    parser.add_argument("--steps", type=int, help="after the warm-up")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    asked, flags = parser.parse_known_args()
    warm_up = WARM_UP[asked.kind]
    with tempfile.TemporaryDirectory() as folder:
        steps = ["--max_steps", str((asked.steps or STEPS[asked.kind]) + warm_up)]
        flags = [*COMMON, *FLAGS[asked.kind], *steps, "--output_dir", folder, *flags]
        trainer = trainer_of(asked.kind, flags, asked.cpu)
        clocks = watched(trainer)
        trainer.fit()
        clocks.append((time.perf_counter(), time.process_time()))
        trainer.close()
        rows = read_jsonl(Path(folder) / "metrics.jsonl")
    seconds = phases(rows[warm_up:])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("| phase | median s | slowest s |\n|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {medians[name]:.3f} | {max(values):.3f} |")
    if asked.json:
        spent = [{"wall": b[0] - a[0], "cpu": b[1] - a[1]} for a, b in pairwise(clocks)]
        values = [{"reward": row["reward_mean"], "loss": row["loss"]} for row in rows]
        asked.json.write_text(json.dumps({"medians": medians, "steps": [a | b for a, b in zip(spent, values)]}))


if __name__ == "__main__":
    main()
