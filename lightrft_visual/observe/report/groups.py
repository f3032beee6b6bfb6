"""Runs that differ in nothing but the seed, as one: the mean of each metric and a band of one standard deviation."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

from .data import RunData, flat_config

FEWEST = 3  # runs of one kind that are taken together without being asked to
SEEDS = ("train.seed", "output.eval_seed", "distributed.local_rank")
Band = list[tuple[float, float, float]]  # (step, low, high)


def seed_groups(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Runs by their settings, seeds and what is said of outputs left out. A run without a configuration is alone."""
    found: dict[Any, list[RunData]] = {}
    for index, run in enumerate(runs):
        flat = {k: v for k, v in flat_config(run.config).items() if k not in SEEDS and not k.startswith("output.")}
        found.setdefault(json.dumps(flat, sort_keys=True, default=str) if run.config else index, []).append(run)
    return list(found.values())


def taken_together(runs: Sequence[RunData], wanted: bool | None) -> list[RunData]:
    """The runs, those of one group as one.

    Args:
        runs: in their order.
        wanted: whether to; None: where a group has `FEWEST` runs.
    """
    groups = seed_groups(runs)
    if wanted is False or (wanted is None and max(map(len, groups)) < FEWEST):
        return list(runs)
    return [as_one(group) if len(group) > 1 else group[0] for group in groups]


def as_one(group: Sequence[RunData]) -> RunData:
    """Means over the runs of a group, at the steps that all of them have, with their bands."""
    shared = os.path.commonprefix([run.name for run in group]).rstrip("0123456789").rstrip("-_./ ")
    one = RunData(group[0].folder, f"{shared or group[0].name} ({len(group)} seeds)", {}, {}, {}, group[0].config)
    for kind in ("metrics", "evaluation"):
        bands: dict[str, Band] = {}
        for name in dict.fromkeys(name for run in group for name in getattr(run, kind)):
            found = _mean_and_band([dict(getattr(run, kind).get(name, ())) for run in group])
            if found:
                getattr(one, kind)[name] = [(step, mean) for step, mean, _ in found]
                bands[name] = [(step, mean - std, mean + std) for step, mean, std in found]
        one.bands[kind] = bands
    return one


def _mean_and_band(tables: Sequence[dict[float, float]]) -> list[tuple[float, float, float]]:
    """(step, mean, standard deviation over runs) of the steps at which every run has a number."""
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    columns = [(step, [table[step] for table in tables]) for step in steps]
    return [
        (step, statistics.fmean(values), statistics.stdev(values))
        for step, values in columns
        if all(map(math.isfinite, values))
    ]


def deviation_of(run: RunData, kind: str, name: str) -> str:
    """` ± 0.012`: half the width of the last band; empty for a single run."""
    band = run.bands.get(kind, {}).get(name)
    return f" ± {(band[-1][2] - band[-1][1]) / 2:.3f}" if band else ""
