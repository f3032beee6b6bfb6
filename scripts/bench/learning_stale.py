"""Learning with rollouts that are k policy versions old: what staleness costs, and what its corrections are worth.

    python scripts/bench/learning_stale.py FOLDER [--k 0 1 2 4] [--corrections behaviour] [--seeds 1 2 3] [flags]
    python scripts/bench/learning_stale.py FOLDER --table

Runs of the embedded task (flags as of examples/train_grpo_vl.py) one after the other, into
FOLDER/k<K>-<CORRECTION>-<SEED>; a run that is there is not repeated. Instead of workers there is one engine in this
process, which makes a batch at the moment in which it is begun. So every token, from step k + 1 on, is exactly k
versions old: the oldest that workers can be, the same in every run, and on one core. Everything else is the code of a
run with workers. At the end, and by --table alone, the table of all that FOLDER has is printed and written to
FOLDER/staleness.md.
"""

from __future__ import annotations

import argparse
import csv
import gc
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from statistics import mean

import torch
from curves import spread

CORRECTIONS = {
    "none": ["async.stale_correction=none"],
    "behaviour": ["async.stale_correction=behaviour"],
    "tis": ["--tis_mode", "token"],
    "mask": ["--tis_mode", "token", "--tis_mask", "true", "--tis_floor", "0.5"],
}
FLAGS = "--engine_type hf --max_steps 240 --eval_steps 20"
LAST = 2  # evaluations whose mean is a run's result: the last ones that all runs have
ENGINES: dict[str, object] = {}


class AtOnce:
    """In the place of `WorkerPool`: work is done by one engine here, when it is submitted."""

    def __init__(self, engine) -> None:
        self.engine, self.workers, self.version = engine, [engine], 0

    def submit(self, *arguments, urgent: bool = False) -> Future:
        result = Future()
        result.set_result((self.engine.generate(*arguments), self.version))
        return result

    def forget(self) -> None:
        self.engine.reset_caches()

    def busy_share(self) -> float:
        return 1.0


class OneEngine:
    """In the place of `Workers`; engines of equal settings are one, as each run begins by giving it weights."""

    def __init__(self, config, blueprint, turns: int = 2) -> None:
        from lightrft_visual.config.choice import load_target

        kind = f"{config.rollout.engine_type} {config.model.pretrain}"
        if kind not in ENGINES:
            ENGINES[kind] = load_target(blueprint.target)(*blueprint.arguments)
        self.pool, self.version = AtOnce(ENGINES[kind]), 0

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]], at_once: bool = True) -> None:
        self.pool.engine.update_weights(named_tensors)
        self.pool.engine.reset_caches()
        self.version += 1
        self.pool.version = self.version

    def measured(self, waited: float, begun: Iterable) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """The next run has the same engine."""


def train(folder: Path, k: int, correction: str, seed: int, flags: list[str]) -> None:
    """One run to its end."""
    from lightrft_visual.config.load import load_config
    from lightrft_visual.config.roots import VL_PRESET
    from lightrft_visual.config.vl import RunConfig
    from lightrft_visual.plugins.ray.rollout import engine
    from lightrft_visual.trainer.vl.trainer import build_trainer

    engine.Workers = OneEngine
    argv = ["--seed", str(seed), "--output_dir", str(folder), "--placement", "split", "--report", "false"]
    argv += [*FLAGS.split(), *flags]
    if k:
        argv += [f"async.max_staleness={k}", *CORRECTIONS[correction]]
    trainer = build_trainer(load_config(RunConfig, argv, preset=VL_PRESET))
    trainer.fit()
    trainer.close()


def evaluations(folder: Path) -> dict[str, list[float]]:
    """The columns of a run's evaluations."""
    with open(folder / "eval_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in ("step", "eval_reward", "eval_reward_greedy")}


def table(folder: Path) -> str:
    """Of all finished runs: the mean of the last evaluations, those of the last steps at which all runs were evaluated;
    over seeds mean and standard deviation."""
    found: dict[tuple[int, str], dict[str, dict]] = defaultdict(dict)
    for path in sorted(folder.glob("k*-*-*/checkpoint-final")):
        k, correction, seed = path.parent.name.split("-")
        found[int(k[1:]), correction][seed] = evaluations(path.parent)
    shared = set.intersection(*(set(run["step"]) for runs in found.values() for run in runs.values())) if found else ()
    ends_at = sorted(shared)[-LAST:]

    def end(run: dict, column: str) -> float:
        return mean(value for step, value in zip(run["step"], run[column]) if step in ends_at)

    columns = ("k", "correction", "seeds", "sampled", "beside k = 0", "greedy", "beside k = 0")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    base = next((runs for (k, _), runs in found.items() if k == 0), {})
    for (k, correction), runs in sorted(found.items()):
        cells = []
        for column in ("eval_reward", "eval_reward_greedy"):
            ends = {seed: end(run, column) for seed, run in runs.items()}
            apart = [value - end(base[seed], column) for seed, value in ends.items() if seed in base]
            cells += [spread(list(ends.values())), spread(apart, sign="+") if k and apart else ""]
        lines.append(f"| {k} | {correction if k else ''} | {', '.join(sorted(runs))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["behaviour"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true")
    args, flags = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tried = [(k, correction) for k in args.k for correction in (args.corrections if k else ["none"])]
    wanted = [(*each, seed) for seed in args.seeds for each in tried]
    for k, correction, seed in [] if args.table else wanted:
        folder = args.folder / f"k{k}-{correction}-{seed}"
        if (folder / "checkpoint-final").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)  # a run that did not end begins anew
        began = time.perf_counter()
        train(folder, k, correction, seed, flags)
        gc.collect()
        last = {name: values[-1] for name, values in evaluations(folder).items()}
        print(f"{folder.name}: {last}, {time.perf_counter() - began:.0f} s", flush=True)
    (args.folder / "staleness.md").write_text(table(args.folder))
    print(table(args.folder))


if __name__ == "__main__":
    main()
