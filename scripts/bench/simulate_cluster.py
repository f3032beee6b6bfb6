"""How long a step would take on N trainers and M rollout engines, by the simulation of the plug-in memory_plan.

    python scripts/bench/simulate_cluster.py --gpus 64 --run outputs/run     # costs and lengths that a run had
    python scripts/bench/simulate_cluster.py --gpus 1024 --token 0.02 --learn 0.004 --mean_length 2000 --prompts 512
    python scripts/bench/simulate_cluster.py --check                         # beside real rollout workers on Ray

--run reads metrics.csv and rollouts/ of a colocated run: the time of a decode step, of scoring and training a token
on one rank, and the lengths of its responses. --check starts 1, 2, 3 and 4 workers of `rollout/remote`, with its pool,
its way of running ahead and its partial rollouts, whose engines sleep as long as decoding would take; the trainer
sleeps too. How long a piece takes to a worker and back is measured first. Each division runs in three rounds, of which
the middle one counts: where a round waits for a host that has other work for seconds, the two others do not. --slower 3
makes all of it three times as long, for a host that is busy all the time.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightrft_visual.experience.rollouts import PromptFeatures
from lightrft_visual.experience.sampling import Completion, SamplingSettings
from lightrft_visual.plugins.memory_plan.cluster import (
    Costs,
    Forecast,
    Layout,
    Lengths,
    best,
    decode_seconds,
    drawn_from,
    generate_seconds,
    layouts,
    long_tailed,
    measured,
    simulate,
)

SETTINGS = SamplingSettings(n=4, max_new_tokens=600)  # of --check
COLUMNS = ("division", "seconds a step", "trainers idle", "engines idle", "versions old, mean", "at most")


def head(*columns: str) -> str:
    """Of the table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def row(found: Forecast, extra: str = "") -> str:
    """A line of the table."""
    idle = f"{found.idle_trainers:.0%} | {found.idle_engines:.0%}"
    age = f"{found.staleness:.2f} | {found.staleness_max}"
    return f"| {found.layout.name}{extra} | {found.step_seconds:.4g} | {idle} | {age} |"


# -- forecasts ---------------------------------------------------------------------------------------------------


def of_run(folder: Path, prompts: int | None) -> tuple[Costs, Lengths]:
    """Costs and lengths of a colocated run. prompts: of a step to come, where another number is wanted."""
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        steps = [{name: float(value) for name, value in each.items() if value} for each in csv.DictReader(file)]
    steps = steps[1:] or steps  # the first one warms caches up
    environment = json.loads((folder / "env.json").read_text())
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    found = [record["response_length"] for record in records]
    samples = max(1, round(len(records) / len({(each["step"], each["group_id"]) for each in records})))
    count = round(median(each["tokens"] for each in steps) / mean(found) / samples) if prompts is None else prompts
    times = {name: median(each.get(f"time_{name}", 0.0) for each in steps) for name in PHASES}
    lengths = drawn_from(found, max(1, count), samples)
    return measured(times, environment["hardware"]["world_size"], lengths), lengths


PHASES = ("generate", "reward", "forward", "train", "sync")


def forecast(asked: argparse.Namespace) -> None:
    """A table of divisions, the best first."""
    if asked.run is not None:
        costs, lengths = of_run(asked.run, asked.prompts)
    else:
        costs = Costs(asked.token, asked.row, asked.prompt, asked.slots, asked.load, asked.learn, asked.step)
        lengths = long_tailed(asked.mean_length, asked.spread, asked.longest, asked.prompts or 128, asked.samples)
    tried = layouts(asked.gpus, asked.staleness)
    if asked.partial:
        tried += [Layout(each.trainers, each.engines, each.staleness, True) for each in tried if each.engines]
    print(f"{costs}\n\n{head(*COLUMNS)}")
    for found in best(costs, tried, lengths)[: asked.show]:
        print(row(found))


# -- beside real workers -------------------------------------------------------------------------------------------


class SleepingEngine:
    """The engine in a worker: sleeps as long as its costs say."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def generate(self, prompts: list[PromptFeatures], settings: SamplingSettings) -> list[list[Completion]]:
        """Responses of the lengths that the prompts ask for, or a segment of each."""
        whole, most = settings.n == SETTINGS.n, settings.max_new_tokens
        wanted = [prompt.metadata["lengths"] for prompt in prompts]
        own = [lengths if whole else [lengths[prompt.copy]] for prompt, lengths in zip(prompts, wanted)]
        left = np.array([[each - len(prompt.continued) for each in lengths] for prompt, lengths in zip(prompts, own)])
        begun = sum(not prompt.continued for prompt in prompts) * (settings.n / SETTINGS.n)
        time.sleep(self.costs.prompt * begun + decode_seconds(np.minimum(left, most), self.costs))
        return [[_of_length(min(each, most), each > most) for each in row.tolist()] for row in left]

    def update_weights(self, named_tensors: Iterator) -> None:
        """Sleep."""
        list(named_tensors)
        time.sleep(self.costs.load)

    def reset_caches(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def _of_length(tokens: int, truncated: bool) -> Completion:
    return Completion([0] * (tokens - 1) + [int(not truncated)], None, "", truncated, [])


def _prompt(seed: int, lengths: np.ndarray) -> PromptFeatures:
    return PromptFeatures("", [], seed, metadata={"lengths": lengths.tolist()}, seed=seed)


def real_run(workers: Any, costs: Costs, layout: Layout, lengths: Lengths, steps: int) -> Forecast:
    """What was measured of a run of `steps` steps: by `RemoteEngine`, and a trainer that sleeps."""
    from lightrft_visual.plugins.ray.rollout.engine import RemoteEngine
    from lightrft_visual.plugins.ray.rollout.partial import PartialRollouts

    partial = None
    if layout.partial:
        silent = SimpleNamespace(decode=lambda *_, **__: "")
        partial = PartialRollouts(workers.pool, silent, layout.partial_tokens, costs.slots)
    engine = RemoteEngine(workers, ahead=layout.staleness > 0, partial=partial)
    batches = [[_prompt(n * 1000 + i, own) for i, own in enumerate(lengths(n))] for n in range(steps)]

    def give(step: int) -> None:
        engine.update_weights([("weight", torch.zeros(16))])
        engine.note_policy(step)

    give(0)
    asked, busy, ages, begun = [], [], [], 0
    first, last = min(2 * layout.staleness + 1, steps - 1), max(steps - layout.staleness, 2)
    for step in range(steps):
        asked.append(time.perf_counter())
        busy.append(workers.pool.busy_share())  # since the step before
        while layout.staleness and begun <= min(step + layout.staleness, steps - 1):
            engine.begin(batches[begun], SETTINGS)
            begun += 1
        made = engine.generate(batches[step], SETTINGS)
        if first <= step < last:
            ages += [step - v for group in made for each in group for v in each.versions or [step]]
        time.sleep(costs.step + costs.learn * float(lengths(step).sum()) / layout.trainers)
        give(step + 1)
    asked.append(time.perf_counter())
    busy.append(workers.pool.busy_share())
    seconds = (asked[last] - asked[first]) / (last - first)
    spans = np.diff(asked)
    at_work = sum(share * span for share, span in zip(busy[first + 1 : last + 1], spans[first:last]))
    learn = mean(costs.step + costs.learn * float(lengths(n).sum()) / layout.trainers for n in range(first, last))
    idle = 1 - at_work / (asked[last] - asked[first])
    return Forecast(layout, seconds, 1 - learn / seconds, idle, mean(ages), max(ages))


def way(workers: Any, costs: Costs, times: int = 8) -> float:
    """Seconds of a piece's way to a worker and back: the median of some pieces, all workers at work."""
    lengths = np.full(SETTINGS.n, 100)
    one, took = _prompt(0, lengths), []
    for _ in range(times):
        began = time.perf_counter()
        for future in [workers.pool.submit([one], SETTINGS) for _ in workers.pool.workers]:
            future.result()
        took.append(time.perf_counter() - began - generate_seconds(lengths[None], costs))
    return max(0.0, median(took))


def middle(runs: Sequence[Forecast]) -> Forecast:
    """The one whose step time is the median; of two the quicker one."""
    return sorted(runs, key=lambda run: run.step_seconds)[(len(runs) - 1) // 2]


def check(asked: argparse.Namespace) -> None:
    """A table of forecasts and of what real workers took."""
    from lightrft_visual.config.placement import ResourcesConfig
    from lightrft_visual.plugins.ray.rollout.engine import Workers
    from lightrft_visual.plugins.ray.rollout.worker import Blueprint

    slow = asked.slower
    costs = Costs(token=0.004 * slow, prompt=0.01 * slow, load=0.05 * slow, learn=2e-4 * slow, step=0.3 * slow)
    lengths = long_tailed(100, 0.8, SETTINGS.max_new_tokens, 16, SETTINGS.n)
    print(head("division", "", *COLUMNS[1:]))
    worst = 0.0
    for count in asked.workers:
        resources = ResourcesConfig(rollout_num_workers=count, rollout_num_cpus=0.1)
        blueprint = Blueprint("simulate_cluster:SleepingEngine", (costs,), 1)
        workers = Workers(SimpleNamespace(distributed=SimpleNamespace(resources=resources)), blueprint, turns=4)
        workers.update([("weight", torch.zeros(16))])
        costs = replace(costs, piece=way(workers, costs))
        print(f"{count} workers: a piece's way takes {costs.piece:.3f} s", flush=True)
        whole = [Layout(1, count, staleness) for staleness in asked.staleness]
        tried = whole + [replace(each, partial=True, partial_tokens=100) for each in whole if each.staleness]
        rounds = [[real_run(workers, costs, each, lengths, asked.steps) for each in tried] for _ in range(asked.rounds)]
        for layout, runs in zip(tried, zip(*rounds)):
            took = [run.step_seconds for run in runs]
            simulated, real = simulate(costs, layout, lengths, asked.steps), middle(runs)
            print(row(simulated, " | simulated"))
            print(row(real, f" | real ({min(took):.3g} to {max(took):.3g} s)"), flush=True)
            worst = max(worst, abs(simulated.step_seconds / real.step_seconds - 1))
        workers.close()
    print(f"\nlargest difference of step times: {worst:.1%}")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run real workers beside the simulation")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4], help="of --check")
    parser.add_argument("--steps", type=int, default=12, help="of each run of --check")
    parser.add_argument("--rounds", type=int, default=3, help="of --check")
    parser.add_argument("--slower", type=float, default=1.0, help="all times of --check: for a busy machine")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--run", type=Path, help="folder of a colocated run")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--partial", action="store_true", help="try partial rollouts too")
    parser.add_argument("--show", type=int, default=10, help="divisions")
    parser.add_argument("--prompts", type=int, help="of a step; default: the run's, or 128")
    parser.add_argument("--samples", type=int, default=8)
    for name, value in (("mean_length", 1000.0), ("spread", 0.8), ("longest", 8192)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    usual = {"token": 0.02, "row": 0.0, "prompt": 0.01, "load": 1.0, "learn": 0.002, "step": 1.0}
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=float, default=value, help="seconds, see Costs")
    parser.add_argument("--slots", type=int, default=256)
    asked = parser.parse_args()
    check(asked) if asked.check else forecast(asked)


if __name__ == "__main__":
    main()
