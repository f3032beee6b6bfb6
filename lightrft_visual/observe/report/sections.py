"""What the report says beside curves and examples: headline values, evaluation, time, comparison, set-up."""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import yaml

from ...data.bad_rows import FILE_NAME
from ...runtime.files import read_jsonl
from .charts import PALETTE, Point
from .curves import ahead_panels, time_panel
from .data import QUICK_DUMPER, PhaseTimes, RunData, flat_config, phase_times

HEADLINE = (
    ("evaluation", "eval_reward", "evaluation reward"),
    ("evaluation", "eval_reward_greedy", "evaluation, greedy"),
    ("metrics", "reward_mean", "training reward"),
)
SHOWN, EXAMPLE_LENGTH = 5, 500
COMPARED = ("eval_reward", "eval_reward_greedy")


def duration(seconds: float) -> str:
    """Short text: 250 ms, 90.0 s, 14 min, 2 h 13 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def color_of(index: int) -> str:
    """The colour of the index-th run, phase or line; after the last one they repeat."""
    return PALETTE[index % len(PALETTE)]


def first_to_last(points: Sequence[Point]) -> tuple[str | None, str]:
    """First and last value; no first one where there is only one."""
    return (f"{points[0][1]:.3f}" if len(points) > 1 else None), f"{points[-1][1]:.3f}"


def tiles(run: RunData) -> list[tuple[str | None, str, str]]:
    """(value at the start, value now, what it is) of what a person looks for first."""
    times = phase_times(run.metrics)
    found = [
        (*first_to_last(points), label) for kind, name, label in HEADLINE if (points := getattr(run, kind).get(name))
    ]
    if run.last_step is not None:
        found.append((None, str(run.last_step), "last step"))
    if times:
        found.append((None, duration(statistics.median(times.steps)), "median step"))
        found.append((None, duration(times.total), "in steps, in all"))
    return found


def evaluation_section(run: RunData) -> list[dict[str, Any]]:
    """First, last and highest value of each evaluation column."""
    kept = []
    for name, points in run.evaluation.items():
        highest_step, highest = max(points, key=lambda point: point[1])
        first, last = points[0][1], points[-1][1]
        kept.append({"name": name, "first": first, "last": last, "highest": highest, "highest_step": int(highest_step)})
    return kept


def limits(times: PhaseTimes) -> list[tuple[str, float]]:
    """The measured step beside what it could be at best: (name, seconds)."""
    found = [("measured step", statistics.median(times.steps))]
    if "reward" in times.phases:
        found.append(("if rewards ran beside everything else", times.limit_hiding("reward")))
    return [*found, ("lower limit: all phases overlapped perfectly", times.limit_overlapped)]


def time_section(run: RunData) -> dict[str, Any] | None:
    """Where a step's time goes; None when no phase was timed."""
    times = phase_times(run.metrics)
    if times is None:
        return None
    phases = [
        {
            "name": name,
            "color": color_of(index),
            "median": statistics.median(seconds),
            "slow": sorted(seconds)[min(len(seconds) - 1, int(0.9 * len(seconds)))],
            "share": times.share(name),
        }
        for index, (name, seconds) in enumerate(times.phases.items())
    ]
    longest = max(phases, key=lambda phase: phase["share"])
    rest = times.unaccounted
    found = {"phases": phases, "longest": longest, "rest": rest, "limits": limits(times), "panel": time_panel(run)}
    return found | {"ahead": ahead_panels(run)}


def left_out_section(run: RunData) -> list[dict[str, Any]]:
    """Data rows that were left out, by cause, the most frequent first: how many, when found, the first of them."""
    causes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in read_jsonl(run.folder / FILE_NAME):
        causes[str(record.get("cause"))].append(record)
    return [
        {
            "cause": cause,
            "count": len(records),
            "found": ", ".join(dict.fromkeys(str(record.get("found")) for record in records[:SHOWN])),
            "example": str(records[0].get("message"))[:EXAMPLE_LENGTH],
        }
        for cause, records in sorted(causes.items(), key=lambda item: -len(item[1]))
    ]


def setup_section(run: RunData) -> dict[str, Any] | None:
    """Command, versions, hardware, configuration; None where none of them is known."""
    environment = run.environment
    command = environment.get("command")
    tables = {
        title: {
            key: ", ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in found.items()
        }
        for title in ("hardware", "versions")
        if isinstance(found := environment.get(title), dict)
    }
    text = yaml.dump(run.config, Dumper=QUICK_DUMPER, sort_keys=False, allow_unicode=True) if run.config else ""
    content = {"command": shlex.join(map(str, command)) if command else "", "tables": tables, "config": text}
    return content if any(content.values()) else None


def comparison_section(runs: Sequence[RunData]) -> dict[str, Any]:
    """Headline values of runs side by side, and the settings in which they differ."""
    entries = []
    for index, run in enumerate(runs):
        times = phase_times(run.metrics)
        values = ["–" if run.last_step is None else str(run.last_step)]
        for name in COMPARED:
            points = run.evaluation.get(name)
            values.append(f"{points[0][1]:.3f} → {points[-1][1]:.3f}" if points else "–")
        values.append(duration(statistics.median(times.steps)) if times else "–")
        entries.append({"name": run.name, "color": color_of(index), "values": values})
    return {"rows": entries, "differences": config_differences(runs)}


def config_differences(runs: Sequence[RunData]) -> list[list[str]]:
    """[setting, value in each run] of the settings that differ; where results are written aside."""
    flats = [flat_config(run.config) for run in runs]
    names = dict.fromkeys(name for flat in flats for name in flat)
    entries = [[name, *(str(flat.get(name, "–")) for flat in flats)] for name in names]
    return [entry for entry in entries if len(set(entry[1:])) > 1 and not entry[0].startswith("output.")]
