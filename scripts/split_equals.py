"""Runs whose rollouts are made by workers, beside the same runs without: at staleness 0 no metric may differ.

    python scripts/split_equals.py FOLDER [--ranks 1] [--steps 10] CASE...
    python scripts/split_equals.py /tmp/split hf vllm drawn                     # GRPO, GRPO, Flow-GRPO
    python scripts/split_equals.py /tmp/split --ranks 2 hf-zero3-lora-w2 drawn-full-w2 hf-k1-w2
    python scripts/split_equals.py /tmp/split --kill_every 10 --steps 100 hf-w2

A case is an engine (hf, vllm; drawn: Flow-GRPO by diffusers) and, joined by hyphens, what differs from a plain run:
zero0, zero2, zero3; lora, full; w1, w2: workers; device: weights go to them by gloo or NCCL; k1, k2: staleness, where
only that the run ends well and how old its tokens are is looked at, and then it is resumed from its middle. All runs of
a call are made by one process a rank, one after the other; what one run was beside which others is of no account.

--kill_every SECONDS: from its second step on a case's workers are ended by SIGKILL in turn. Seeds name what is drawn:
what a dead worker held is made again as it was, and a prompt that is lost or doubled shows. The exit code is 1 where a
metric differs, times aside, a run does not end well, or no worker was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
COMMON = "--report false --eval_steps 0 --max_eval_samples 8 --rollout_batch_size 4 --n_samples_per_prompt 4"
TEXT = "--train_batch_size 16 --micro_train_batch_size 8 --micro_rollout_batch_size 4 --image_dependence_every 0"
# workers' graphs cannot serve the trainer, so both replay, with sums in the same order
DRAWN = (
    "--rollout_graph_gib 0 --train_batch_size 16 --micro_train_batch_size 4 --micro_rollout_batch_size 4 "
    "--num_steps 4 --eval_num_steps 4"
)
SPLIT = "--placement split --rollout_num_cpus 0.4"


@dataclass(frozen=True)
class Case:
    """A run as its name says. workers: 0 where rollouts are the trainer's own; transfer: of weights to workers."""

    engine: str
    flags: tuple[str, ...]
    workers: int
    staleness: int
    transfer: str = "auto"

    @classmethod
    def of(cls, name: str) -> Case:
        """Raises SystemExit for words that mean nothing."""
        engine, *words = name.split("-")
        flags, workers, staleness, transfer = [], 1, 0, "auto"
        for word in words:
            kind, number = word.rstrip("0123456789"), word.lstrip("abcdefghijklmnopqrstuvwxyz")
            if kind == "zero":
                flags += ["--zero_stage", number]
            elif kind == "w":
                workers = int(number)
            elif kind == "k":
                staleness = int(number)
            elif word == "device":
                transfer = word
            elif word == "lora":
                flags += ["--lora_rank", "4"]
            elif word == "full":
                flags += ["--lora_rank", "0"]
            else:
                sys.exit(f"{name}: {word} means nothing; see {__file__}")
        if engine not in ("hf", "vllm", "drawn"):
            sys.exit(f"{name}: a case begins with hf, vllm or drawn")
        return cls(engine, tuple(flags), workers, staleness, transfer)

    @property
    def alone(self) -> Case:
        """The same run with rollouts of its own."""
        return Case(self.engine, self.flags, 0, 0)

    @property
    def name(self) -> str:
        """Of its folder."""
        told = "".join(flag.replace("--", "-").replace("_", "") for flag in self.flags)
        return f"{self.engine}{told}-w{self.workers}-k{self.staleness}-{self.transfer}"

    def argv(self, steps: int) -> list[str]:
        """Of the example scripts."""
        argv = [*COMMON.split(), *(DRAWN if self.engine == "drawn" else TEXT).split(), *self.flags]
        argv += ["--max_steps", str(steps), "--save_steps", str(max(1, steps // 2))]
        if self.engine != "drawn":
            argv += ["--engine_type", self.engine]
        if self.workers:
            argv += [*SPLIT.split(), "--rollout_num_workers", str(self.workers)]
            argv += ["--weight_transfer", self.transfer]
        return argv + ([f"async.max_staleness={self.staleness}"] if self.staleness else [])


def train(case: Case, folder: Path, argv: list[str]) -> None:
    """One run in this process."""
    from lightrft_visual.config.diffusion import DiffusionRunConfig
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.spellings import DIFFUSION_PRESET, VL_PRESET
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.trainer.diffusion.build import build_diffusion_trainer
    from lightrft_visual.trainer.vl.trainer import build_trainer

    drawn = case.engine == "drawn"
    schema, preset = (DiffusionRunConfig, DIFFUSION_PRESET) if drawn else (RunConfig, VL_PRESET)
    config = load_config(schema, [*argv, "--output_dir", str(folder)], preset=preset)
    trainer = (build_diffusion_trainer if drawn else build_trainer)(config)
    trainer.fit()
    if case.workers:  # vLLM's own engine would take the process group with it
        trainer.close()


def drive(folder: Path, cases: list[Case], steps: int) -> None:
    """All runs on this rank."""
    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.runtime import collectives

    quiet_libraries()
    pairs = ([case] if case.staleness else [case.alone, case] for case in cases)
    for case in dict.fromkeys(itertools.chain.from_iterable(pairs)):
        where = folder / case.name
        train(case, where, case.argv(steps))
        if case.staleness:
            again = folder / f"{case.name}-again"
            train(case, again, [*case.argv(steps), "--resume_from", str(where / f"checkpoint-{max(1, steps // 2)}")])
        if collectives.is_rank_0():
            print(f"done: {case.name}", flush=True)
        gc.collect()


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without times."""
    with open(folder / "metrics.csv") as file:
        return [{name: value for name, value in row.items() if "time" not in name} for row in csv.DictReader(file)]


def differing(alone: list[dict[str, str]], split: list[dict[str, str]]) -> list[str]:
    """What is not the same."""
    if len(alone) != len(split):
        return [f"{len(split)} of {len(alone)} steps"]
    return [
        f"step {one['step']}: {name} {value} {other.get(name)}"
        for one, other in zip(alone, split)
        for name, value in one.items()
        if value != other.get(name)
    ]


def look(folder: Path, case: Case, steps: int) -> bool:
    """Say how a case came out; whether well."""
    split = metrics(folder / case.name)
    if not case.staleness:
        found = differing(metrics(folder / case.alone.name), split)
        print(
            f"{case.name}: {len(split)} steps, {len(split[0])} metrics each, {len(found)} differ from {case.alone.name}"
        )
        print("".join(f"    {each}\n" for each in found[:8]), end="")
        return not found and len(split) == steps
    again = metrics(folder / f"{case.name}-again")
    oldest = max(float(row["staleness_max"]) for row in split + again)
    mean = sum(float(row["staleness_mean"]) for row in split) / len(split)
    ends = [row["step"] for row in again]
    print(f"{case.name}: {len(split)} steps, {mean:.2f} versions old, at most {oldest:g}; resumed: steps {ends}")
    return len(split) == steps and ends[-1:] == [str(steps)] and oldest <= case.staleness


def workers_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The rollout workers below a run's process."""
    found = []
    with contextlib.suppress(psutil.Error):  # of those that end meanwhile
        for process in psutil.Process(run.pid).children(recursive=True):
            if process.name().startswith("ray::_RayActor"):
                found.append(process)
    return found


def kill_workers(run: subprocess.Popen, folder: Path, cases: list[Case], every: float) -> int:
    """Until the run ends, one of its rollout workers every so many seconds of training; how many were."""
    killed, last = 0, time.monotonic()
    while run.poll() is None:
        time.sleep(0.2)
        workers = workers_of(run)
        if not workers or not any((folder / case.name / "metrics.csv").exists() for case in cases):
            last = time.monotonic()
        elif time.monotonic() - last > every:
            with contextlib.suppress(psutil.Error):
                workers[killed % len(workers)].kill()
                killed += 1
            last = time.monotonic()
    return killed


def free_port() -> int:
    """Of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=["hf", "vllm", "drawn"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kill_every", type=float)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    cases = [Case.of(name) for name in args.cases]
    if args.drive:
        drive(args.folder, cases, args.steps)
        return
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    program = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    command = [
        program, "--num_gpus", str(args.ranks), "--master_port", str(free_port()), __file__, str(args.folder),
        *args.cases, "--steps", str(args.steps), "--drive",
    ]  # fmt: skip
    with open(args.folder / "log.txt", "w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        killed = kill_workers(run, args.folder, cases, args.kill_every) if args.kill_every else None
        code = run.wait()
    if code:
        sys.exit(f"the runs ended with {code}: {args.folder / 'log.txt'}")
    if killed is not None:
        print(f"{killed} workers killed")
    sys.exit(killed == 0 or not all([look(args.folder, case, args.steps) for case in cases]))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    if "--drive" in sys.argv:
        from lightrft_visual.runtime import watchdog

        watchdog.stop()  # else the others would take this rank for one that died
        os._exit(0)  # vLLM's engine does not end in order beside others
