"""Seconds of a whole training step of the embedded models, by phase.

    OMP_NUM_THREADS=2 python scripts/bench/step_time.py vl|drawing [--steps N] [--cpu] [--json FILE]
        [--against COMMIT] [flag of the examples ...]

vl: GRPO of 8 prompts x 8 completions x 32 tokens exactly, one 56x56 image a prompt; 30 steps after a warm-up of 3.
drawing: Flow-GRPO of 8 prompts x 8 images x 10 denoising steps; 3 steps after a warm-up of 1. Prints medians and the
slowest: seconds of the wall, or with --cpu of the processor, which other programs on the machine disturb less. --json:
the medians, and seconds (both kinds), reward and loss of every step, warm-up included; of drawing also the operations
of one denoising step of sampling. --against: this checkout and a commit, three runs of each by turns, both measured by
the scripts of this checkout; prints their medians. No step saves. Unknown arguments go to the run:
`--packing_samples true`, or `--pretrain ... --height 512 --width 512` for a model of your own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
BENCH, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(BENCH)]

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
ROUNDS = 3  # of a comparison


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


def first_sampling() -> list[tuple[Any, Any]]:
    """Arguments of the first call of a diffusion sampler from now on; filled by the run."""
    from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler

    calls, plain = [], DiffusionSampler.sample

    def noted(*given: Any, **named: Any) -> Any:
        calls.extend([(given, named)] * (not calls))
        return plain(*given, **named)

    DiffusionSampler.sample = noted
    return calls


def denoising_operations(given: Any, named: Any) -> int:
    """Of one stochastic step, batch and all: what drawing with a step more starts more."""
    from operations import operations

    sampler, *batch = given
    counts = [
        operations(
            partial(type(sampler)(replace(sampler.config, num_steps=steps), sampler.noise).sample, *batch, **named)
        )
        for steps in (sampler.config.num_steps - 1, sampler.config.num_steps)
    ]
    return counts[1] - counts[0]


def compare(commit: str, arguments: Sequence[str]) -> None:
    """Runs of this checkout and of a commit by turns; prints a table of their medians."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        other, result = Path(folder, "other"), Path(folder, "result.json")
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), commit], check=True)
        try:
            for name in ("step_time.py", "operations.py"):
                shutil.copy(BENCH / name, other / "scripts" / "bench" / name)
            runs: list[list[dict]] = [[], []]
            for _ in range(ROUNDS):
                for found, root in zip(runs, (ROOT, other)):
                    command = [sys.executable, str(root / "scripts" / "bench" / "step_time.py"), *arguments]
                    environment = os.environ | {"PYTHONPATH": str(root)}
                    subprocess.run([*command, "--json", str(result)], check=True, env=environment, stdout=sys.stderr)
                    found.append(json.loads(result.read_text()))
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    print(f"| | here | {commit} | ratio |\n|---|---|---|---|")
    for name in runs[0][0]["medians"]:
        here, there = (statistics.median(run["medians"].get(name, 0.0) for run in side) for side in runs)
        print(f"| {name}, s | {here:.3f} | {there:.3f} | {here / there if there else float('nan'):.2f} |")
    for here, there in zip(*(side[0]["denoising_operations"] for side in runs)):
        print(f"| operations of a denoising step | {here} | {there} | {here / there:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLAGS)
    parser.add_argument("--steps", type=int, help="after the warm-up")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against")
    asked, flags = parser.parse_known_args()
    if asked.against:
        words = [asked.kind, *(["--steps", str(asked.steps)] if asked.steps else []), *["--cpu"] * asked.cpu, *flags]
        return compare(asked.against, words)
    warm_up = WARM_UP[asked.kind]
    with tempfile.TemporaryDirectory() as folder:
        steps = ["--max_steps", str((asked.steps or STEPS[asked.kind]) + warm_up)]
        flags = [*COMMON, *FLAGS[asked.kind], *steps, "--output_dir", folder, *flags]
        trainer = trainer_of(asked.kind, flags, asked.cpu)
        clocks, sampled = watched(trainer), first_sampling()
        trainer.fit()
        clocks.append((time.perf_counter(), time.process_time()))
        counts = [denoising_operations(*call) for call in sampled if asked.json]
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
        each = [a | b for a, b in zip(spent, values)]
        asked.json.write_text(json.dumps({"medians": medians, "steps": each, "denoising_operations": counts}))


if __name__ == "__main__":
    main()
