"""What a run folder holds, read for the report. Any part may be missing: a run may be young, or cut short."""

import json
import logging
import math
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from ...errors import DataError
from ...runtime.files import QUICK_LOADER, compose_yaml, read_jsonl
from ...runtime.masking import mask_config
from ..environment import ENDED
from ..images import SHEET, data_uri
from ..metrics import csv_records
from ..recorder import ALARMS, SHEET_FOLDER, STEP_FILE, numbered, read_object

logger = logging.getLogger(__name__)

Points = list[tuple[float, float]]
Band = list[tuple[float, float, float]]  # (step, low, high)
MAX_PIXELS = 40_000_000
MADE = ("config.resolved.yaml", "env.json", "metrics.csv", "eval_metrics.csv", "rollouts", "crash.log")
EVAL_FILE = re.compile(r"eval_step_(\d+)\.jsonl$")


@dataclass
class RunData:
    """A run's metrics by column as (step, value), its environment, configuration, rollout files and contact sheets."""

    folder: Path
    name: str
    metrics: dict[str, Points]
    evaluation: dict[str, Points]
    environment: dict[str, Any]
    config: dict[str, Any]
    eval_rollouts: list[tuple[int, Path]] = field(default_factory=list)
    train_rollouts: list[tuple[int, Path]] = field(default_factory=list)
    sheets: list[tuple[int, Path]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)  # of the guard
    # How it ended, as of `write_end`: of several seeds as one each; none while it runs, or where it was killed.
    ends: list[dict[str, Any]] = field(default_factory=list)
    # Of several seeds as one: by kind and column, (step, low, high).
    bands: dict[str, dict[str, Band]] = field(default_factory=dict)

    @property
    def last_step(self) -> int | None:
        """The last step that any metric has."""
        steps = [points[-1][0] for points in (*self.metrics.values(), *self.evaluation.values()) if points]
        return int(max(steps)) if steps else None

    @property
    def is_empty(self) -> bool:
        """Whether the folder holds nothing to show yet."""
        return not (self.metrics or self.evaluation or self.eval_rollouts or self.train_rollouts or self.sheets)


def is_readable(path: Path) -> bool:
    """Whether there is a regular file that can be read: a pipe in its place would never end."""
    return path.is_file() and os.access(path, os.R_OK)


@contextmanager
def left_out(path: Path) -> Iterator[None]:
    """Inside a file of the run is read; what is wrong with it is a warning, and the report goes on without the rest."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, RecursionError, yaml.YAMLError) as error:
        logger.warning("%s is left out of the report: %s", path, error)


def read_columns(path: Path) -> dict[str, Points]:
    """Columns of a metrics file without empty and text cells, in file order."""
    columns: dict[str, Points] = {}
    with left_out(path):
        for record in csv_records(path) if is_readable(path) else ():
            step = int(record.pop("step"))
            for name, text in record.items():
                points = columns.setdefault(name, [])
                if (value := to_float(text)) is not None:
                    points.append((step, value))
    return {name: points for name, points in columns.items() if points and name}  # pandas' index has no name


def to_float(text: str) -> float | None:
    """The number a cell holds, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """config.resolved.yaml with secrets masked; empty where it is missing or damaged."""
    path, content = folder / "config.resolved.yaml", None
    with left_out(path):
        if is_readable(path):
            text = path.read_text(encoding="utf-8")
            compose_yaml(text, QUICK_LOADER)  # is it of bounded size?
            content = yaml.load(text, Loader=QUICK_LOADER)
    return mask_config(content) if isinstance(content, dict) else {}


def is_run(folder: Path) -> bool:
    """Whether there is any of what a run writes at its start, or as it goes on."""
    return any((folder / name).exists() for name in MADE)


def load_run(folder: str | Path) -> RunData:
    """Read a run's folder. DataError when there is no such folder, or none of a run's files in it."""
    folder = Path(folder)
    if not is_run(folder):
        inside = folder.resolve().parent
        raise DataError(f"{folder} is not the folder of a run" + (f"; {inside} is" if is_run(inside) else ""))
    rollouts = list((folder / "rollouts").glob("*.jsonl"))
    evaluated = numbered(rollouts, EVAL_FILE)
    trained = [(step, path) for step, path in numbered(rollouts, STEP_FILE) if path.name.startswith("step_")]
    sheets = [(epoch, path / SHEET) for epoch, path in numbered(folder.glob("eval_epoch_*"), SHEET_FOLDER)]
    environment, end = (
        read_object(folder / name) if is_readable(folder / name) else {} for name in ("env.json", ENDED)
    )
    config = read_config(folder)
    return RunData(
        folder,
        str(flat_config(config).get("output.run_name") or folder.resolve().name),
        read_columns(folder / "metrics.csv"),
        read_columns(folder / "eval_metrics.csv"),
        environment,
        config,
        evaluated,
        trained,
        [(epoch, path) for epoch, path in sheets if path.exists()],
        read_jsonl(folder / ALARMS),
        [{name: str(end.get(name, "")) for name in ("how", "text")}] if end else [],
    )


def flat_config(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat.update(flat_config(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return flat


class Thumbnails:
    """Small images as data URIs, within a budget of bytes for the whole report."""

    def __init__(self, budget: int):
        self.left = budget

    def uri(self, folder: Path, name: str, side: int, quality: int = 72) -> tuple[str, tuple[int, int]] | None:
        """(data URI, original size) of an image inside `folder`; None when missing, damaged, outside or too much.

        Args:
            folder: that the image must lie in.
            name: of the file, relative to the folder, as a record or the folder itself tells it.
            side: pixels of the longer side at most.
            quality: of a JPEG, 1 to 95.
        """
        try:
            path = (folder / name).resolve()
            if not path.is_relative_to(folder.resolve()) or not path.is_file():
                return None
            with Image.open(path) as image:
                if image.width * image.height > MAX_PIXELS:
                    return None
                size = image.size
                uri = data_uri(image.convert("RGB"), side, quality)
        except (OSError, SyntaxError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
            logger.warning("%s is left out of the report: %s", ascii(name), error)
            return None
        if len(uri) > self.left:
            return None
        self.left -= len(uri)
        return uri, size


@dataclass
class PhaseTimes:
    """Seconds of each phase over a run, and the limit model made of them."""

    phases: dict[str, list[float]]  # one value a step
    steps: list[float]  # seconds of the whole step

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.steps)

    def share(self, name: str) -> float:
        """Share of all steps' time that a phase took."""
        return sum(self.phases[name]) / self.total

    @property
    def unaccounted(self) -> float:
        """Share of the time that no phase has measured."""
        return max(0.0, 1 - sum(self.share(name) for name in self.phases))

    def limit_hiding(self, name: str) -> float:
        """Median seconds of a step if this one phase ran beside all others."""
        return statistics.median(max(step - values, values) for step, values in zip(self.steps, self.phases[name]))

    @property
    def limit_overlapped(self) -> float:
        """Median seconds of a step if all phases overlapped perfectly: its longest phase."""
        return statistics.median(max(values) for values in zip(*self.phases.values()))


def phase_times(metrics: dict[str, Points]) -> PhaseTimes | None:
    """The phases' times at the steps that have them; None when none was measured."""
    columns = {name[5:]: dict(points) for name, points in metrics.items() if name.startswith("time_")}
    whole = columns.pop("step", None)
    columns = {name: values for name, values in columns.items() if any(value > 0 for value in values.values())}
    if not columns:
        return None
    steps = sorted({step for values in columns.values() for step in values})
    phases = {name: [finite_or_zero(values.get(step)) for step in steps] for name, values in columns.items()}
    sums = [sum(values[index] for values in phases.values()) for index in range(len(steps))]
    totals = [max(finite_or_zero((whole or {}).get(step)), sums[index]) for index, step in enumerate(steps)]
    kept = [index for index, total in enumerate(totals) if 0 < total < 1e9]  # a longer one is damage
    phases = {name: [values[index] for index in kept] for name, values in phases.items()}
    return PhaseTimes(phases, [totals[index] for index in kept]) if kept else None


def finite_or_zero(value: float | None) -> float:
    """The value, 0 where it is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else 0.0


# -- runs that differ in nothing but the seed, as one: the mean of each metric and a band of one standard deviation ----

FEWEST = 3  # runs of one kind that are taken together without being asked to
SEEDS = ("train.seed", "output.eval_seed", "distributed.local_rank")
EVALUATED = ("output.eval_samples_per_prompt", "output.eval_ema", "output.eval_seed")  # they decide what is measured
COPY = re.compile(r"(?<=/given/)([0-9a-f]{32})-[^/]+")  # of a loaded model: its weights, then host and process
NUMBERED = re.compile(r"^(python:\w+?)_\d+$")  # data that a program gave anew


def compared_settings(run: RunData) -> dict[str, Any]:
    """Settings by their whole names, of outputs those of evaluations alone; objects of a program by what is the same in
    another process."""
    flat = flat_config(run.config)
    found = {name: value for name, value in flat.items() if not name.startswith("output.") or name in EVALUATED}
    for name, value in found.items():
        if isinstance(value, str):
            found[name] = (NUMBERED if name.startswith("data.") else COPY).sub(r"\1", value)
    return found


def seed_groups(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Runs by their compared settings without seeds. One that has no configuration, or no step yet, is alone."""
    found: dict[Any, list[RunData]] = {}
    for index, run in enumerate(runs):
        flat = {name: value for name, value in compared_settings(run).items() if name not in SEEDS}
        known = run.config and run.last_step is not None
        found.setdefault(json.dumps(flat, sort_keys=True, default=str) if known else index, []).append(run)
    return list(found.values())


def taken_together(runs: Sequence[RunData], wanted: bool | None) -> list[RunData]:
    """The runs, those of one group as one.

    Args:
        runs: in their order.
        wanted: whether to, from two runs on; None: groups of at least `FEWEST` runs.
    """
    groups, fewest = seed_groups(runs), 2 if wanted else FEWEST
    if wanted is False or max(map(len, groups)) < fewest:
        return list(runs)
    return [run for group in groups for run in ([as_one(group)] if len(group) >= fewest else group)]


def as_one(group: Sequence[RunData]) -> RunData:
    """Means over the runs of a group, at each step those that have it, with their bands; settings tell all seeds."""
    shared = os.path.commonprefix([run.name for run in group]).rstrip("0123456789").rstrip("-_./ ")
    settings = [compared_settings(run) for run in group]
    told = {name: {str(each.get(name)) for each in settings} for name in SEEDS if name in settings[0]}
    listed = {name: ", ".join(sorted(seeds, key=lambda seed: (len(seed), seed))) for name, seeds in told.items()}
    one = RunData(group[0].folder, shared or group[0].name, {}, {}, {}, settings[0] | listed)
    one.alarms, one.ends = ([each for run in group for each in getattr(run, kind)] for kind in ("alarms", "ends"))
    for kind in ("metrics", "evaluation"):
        bands: dict[str, Band] = {}
        for name in dict.fromkeys(name for run in group for name in getattr(run, kind)):
            found = _mean_and_band([dict(getattr(run, kind).get(name, ())) for run in group])
            if found:
                getattr(one, kind)[name] = [(step, mean) for step, mean, _ in found]
                bands[name] = [(step, mean - std, mean + std) for step, mean, std in found]
        one.bands[kind] = bands
    there = sum((run.last_step or 0) >= (one.last_step or 0) for run in group)
    seeds = len({tuple(str(each.get(name)) for name in SEEDS) for each in settings})
    count = f"{seeds} seeds" if seeds == len(group) else f"{len(group)} runs, {seeds} seed{'s' * (seeds > 1)}"
    one.name += f" ({count}{f', {there} at the last step' if there < len(group) else ''})"
    return one


def _mean_and_band(tables: Sequence[dict[float, float]]) -> list[tuple[float, float, float]]:
    """(step, mean, standard deviation) over the runs that have the step, where there are two and all are numbers."""
    steps = sorted(set().union(*tables))
    columns = [(step, [table[step] for table in tables if step in table]) for step in steps]
    return [
        (step, statistics.fmean(values), statistics.stdev(values))
        for step, values in columns
        if len(values) > 1 and all(map(math.isfinite, values))
    ]


def deviation_of(run: RunData, name: str) -> str:
    """` ± 0.012`: half the width of an evaluation metric's band at its last step; empty for a single run."""
    band = run.bands.get("evaluation", {}).get(name)
    return f" ± {(band[-1][2] - band[-1][1]) / 2:.3f}" if band else ""
