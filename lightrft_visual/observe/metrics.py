"""Metrics of one step: sums over micro-batches and ranks."""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import itertools
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..errors import ConfigError, writable
from ..runtime.collectives import all_gather_object, all_reduce_sum
from ..runtime.files import append_line, read_jsonl, to_json, write_atomic
from ..runtime.packages import missing

logger = logging.getLogger(__name__)


Number = float | int | torch.Tensor
COUNTED = ("/failures", "/not_applicable")  # ends of names of counts of samples, which add up over ranks
SPENT = "/time"  # of seconds, which ranks spend at once


def as_double(value: Number) -> torch.Tensor:
    """A detached float64 scalar on its own device, so that adding up micro-batches never waits for the device."""
    return torch.as_tensor(value, dtype=torch.float64).detach()


def numbers(values: Sequence[torch.Tensor]) -> list[float]:
    """Scalars of any devices as numbers: those of one device leave it together, by one read."""
    found: dict[int, float] = {}
    for device in {value.device for value in values}:
        own = {index: value.reshape(()) for index, value in enumerate(values) if value.device == device}
        found |= zip(own, torch.stack([*own.values()]).tolist())
    return [found[index] for index in range(len(values))]


@dataclass
class Moments:
    """Count, mean and sum of squared deviations; `merge` is exact for any split (Chan, Golub, LeVeque 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, other: Moments) -> Moments:
        """The moments of both together (Chan et al. 1979, pairwise update)."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        squares = self.squares + other.squares + delta * delta * self.count * other.count / count
        return Moments(count, mean, squares)

    @classmethod
    def of(cls, values: torch.Tensor) -> Moments:
        """Moments of all elements; NaN stays NaN."""
        if values.numel() == 0:
            return cls()
        values = values.detach().double()
        mean = values.mean()
        return cls(float(values.numel()), *numbers([mean, (values - mean).square().sum()]))

    @classmethod
    def over_ranks(cls, values: torch.Tensor) -> Moments:
        """Moments of all ranks' elements, the same on every rank. A collective, also for a rank without any."""
        values = values.detach().double()
        count, total = all_reduce_sum(torch.stack([values.new_tensor(values.numel()), values.sum()])).tolist()
        mean = total / max(count, 1.0)
        return cls(count, mean, all_reduce_sum((values - mean).square().sum()).item())

    @property
    def sample_variance(self) -> float:
        """Variance with n - 1; 0 for fewer than two elements."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


def largest(values: Sequence[float]) -> float:
    """max() that keeps NaN wherever it stands."""
    return math.nan if any(map(math.isnan, values)) else max(values)


@dataclass
class MetricsAccumulator:
    """Collects one step's metrics over micro-batches; `reduce` gives the same dict on every rank.

    Ratios are kept as numerator and denominator, so that a mean over tokens stays a mean over all tokens however they
    are cut into micro-batches and ranks. A name that only some ranks have seen is reduced over those. A ratio whose
    denominator is 0 (nothing was counted) is left out of the result rather than reported as 0.
    """

    _sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _totals: dict[str, torch.Tensor] = field(default_factory=dict)
    _maxima: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _moments: dict[str, Moments] = field(default_factory=dict)

    def add(self, name: str, numerator: Number, denominator: Number = 1.0) -> None:
        """Add one part of a ratio.

        Args:
            name: of the metric.
            numerator: sum over this part.
            denominator: what it is divided by, such as a count of tokens; left out: one observation of a mean.
        """
        own, old = (as_double(numerator), as_double(denominator)), self._sums.get(name)
        self._sums[name] = own if old is None else (old[0] + own[0], old[1] + own[1])

    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add a tensor's elements to a mean over all elements.

        Args:
            name: of the metric.
            values: of any shape.
            mask: of the same shape, true where elements count; None: everywhere.
        """
        if mask is None:
            self.add(name, values.detach().double().sum(), values.numel())
        else:
            counted = mask.to(values.device).bool()
            self.add(name, torch.where(counted, values.detach(), 0.0).double().sum(), counted.sum())

    def add_total(self, name: str, value: Number) -> None:
        """Add to a sum over micro-batches and ranks, such as a count of tokens."""
        self._totals[name] = as_double(value) + self._totals.get(name, 0.0)

    def add_max(self, name: str, value: Number) -> None:
        """Keep the largest over micro-batches and ranks; NaN wins over every number."""
        self._maxima.setdefault(name, []).append(as_double(value))

    def add_moments(self, name: str, values: torch.Tensor) -> None:
        """Report `<name>_mean` and `<name>_std` (population) over the elements of all micro-batches and ranks."""
        self._moments[name] = self._moments.get(name, Moments()).merge(Moments.of(values))

    def add_numbers(self, found: Mapping[str, float]) -> None:
        """Add plain numbers of this rank: counts are summed over ranks, anything else is averaged."""
        for name, value in found.items():
            if name.endswith(COUNTED):
                self.add_total(name, value)
            else:
                self.add(name, value)

    def add_own(self, giver: str, name: str, value: Any) -> None:
        """As `add_numbers`, of one number that a hook gives.

        Args:
            giver: what gives it, as the error names it.
            name: of the metric.
            value: a number, or a tensor of one element.

        Raises:
            ConfigError: for what is no number, and for a name that a step's metrics have: two would be averaged.
        """
        moments = [f"{each}_{kind}" for each in self._moments for kind in ("mean", "std")]
        taken = name in ("step", *self._sums, *self._totals, *self._maxima, *moments)
        if taken or name.startswith("time_"):
            raise ConfigError(f"{giver} gives {name}, a metric that there is: give it another name")
        try:
            self.add_numbers({name: float(value)})
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"{giver}: {name} is no number: {error}") from error

    def reduce(self) -> dict[str, float]:
        """Combine all ranks (a collective: every rank calls it) and start afresh."""
        mine = self._host_values()
        self.__init__()
        ranks = all_gather_object(mine)
        result: dict[str, float] = {}
        for name, parts in by_name(ranks, "sums").items():
            denominator = math.fsum(part[1] for part in parts)
            if denominator != 0:
                result[name] = sum(part[0] for part in parts) / denominator
        result |= {name: sum(values) for name, values in by_name(ranks, "totals").items()}
        result |= {name: largest(values) for name, values in by_name(ranks, "maxima").items()}
        for name, found in by_name(ranks, "moments").items():
            moments = functools.reduce(Moments.merge, found)
            if moments.count:
                result[f"{name}_mean"], result[f"{name}_std"] = moments.mean, moments.std
        return result

    def _host_values(self) -> dict[str, dict]:
        sums, maxima = itertools.chain(*self._sums.values()), itertools.chain(*self._maxima.values())
        read = iter(numbers([*sums, *self._totals.values(), *maxima]))
        return {
            "sums": {name: (next(read), next(read)) for name in self._sums},
            "totals": {name: next(read) for name in self._totals},
            "maxima": {name: largest([next(read) for _ in values]) for name, values in self._maxima.items()},
            "moments": self._moments,
        }


def by_name(ranks: list[dict[str, dict]], kind: str) -> dict[str, list]:
    """What ranks have under each name, names in order of first appearance: the same on every rank."""
    found: dict[str, list] = {}
    for values in ranks:
        for name, value in values[kind].items():
            found.setdefault(name, []).append(value)
    return found


def gathered_in_order(mine: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """(number, something) of all ranks, by their numbers. A collective."""
    return sorted((pair for part in all_gather_object(mine) for pair in part), key=lambda pair: pair[0])


def means_over_ranks(mine: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of the finite values under each name, over the samples of all ranks that have it; NaN where none is.

    mine: (number, values by name) of this rank's samples; values are summed by the numbers, on any number of ranks
    alike. One collective: ranks may know other names.
    """
    found: dict[str, list[float]] = {}
    for _, values in gathered_in_order(mine):
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in found.items()}
    return {name: sum(values) / len(values) if values else math.nan for name, values in finite.items()}


METRIC_COLUMNS = (
    "step", "reward_mean", "reward_std", "loss", "kl", "grad_norm", "clip_frac", "ratio_max_dev_first",
    "rollout_logp_diff_max", "response_length", "tokens", "time_generate", "time_reward", "time_forward", "time_train",
    "time_sync", "time_step",
)  # fmt: skip
EVAL_COLUMNS = ("step", "eval_reward", "eval_reward_greedy")
# What a step and its guard report, beside times and reward/...; other METRIC_COLUMNS are of losses or rollout metrics.
OF_THE_STEP = {
    *METRIC_COLUMNS, "learning_rate", "skipped_steps", "kl_coef", "policy_version", "epoch", "bad_rows",
    "zero_std_ratio", "parity", "gold", "repetition", "identical_share", "common_answer", "image_colours",
    "image_edges", "image_brightness", "image_blank", "image_diversity", "drawing_diversity",
} - {"kl", "clip_frac", "response_length"}  # fmt: skip


def check_given(giver: str, given: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Raise ConfigError for a metric with a name that a step's have, as two would be averaged, and for no number.

    Args:
        giver: of the metrics, for the message.
        given: by name.
        taken: names beside those of the step itself.
    """
    for name, value in given.items():
        if name in OF_THE_STEP or name in taken or name.startswith(("time_", "reward/")):
            raise ConfigError(f"{giver} gives {name}, a metric that there is: give it another name")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ConfigError(f"{giver}: {name} is no number: a tensor of shape {tuple(value.shape)}")


class Sink:
    """What the run recorder writes to."""

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers; those of a step that was written already take the place of them and of what followed."""
        raise NotImplementedError

    def cut_back(self, step: int) -> None:
        """Forget the steps behind this one."""

    def close(self, failed: bool = False) -> None:
        """The run has ended; failed: by an error."""


def column_name(name: str) -> str:
    """A metric's name on one line that every sink takes: other than printable characters become their escapes.

    Names hold labels and reward components, which are text of the data.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in name)


def parse_step(text: Any) -> int | None:
    """The step in a cell, None where it holds no whole number."""
    try:
        return int(text)
    except (TypeError, ValueError, OverflowError):  # OverflowError: 1e400 in a JSON line
        return None


def csv_records(path: Path) -> list[dict[str, str]]:
    """The complete rows of a file of metrics, as text; a torn last row, rows without a step number and those that
    cannot be read are left out."""
    if not path.exists():
        return []
    lines: list[list[str]] = []
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:  # Excel's files begin so
        reader, error = csv.reader(line for line in file if line.endswith("\n")), None
        while True:
            try:
                lines.append(next(reader))
            except StopIteration:
                break
            except csv.Error as each:
                error = error or each
    if error is not None:
        logger.warning("%s has rows that cannot be read and are left out: %s", path, error)
    header, *records = lines or [[]]
    whole = [dict(zip(header, record)) for record in records if len(record) == len(header)]
    return [record for record in whole if parse_step(record.get("step")) is not None]


class CsvSink(Sink):
    """One row a step. New columns may appear at any step: the file is then rewritten with the wider header."""

    def __init__(self, path: str | Path, first_columns: Sequence[str] = METRIC_COLUMNS):
        self.path = Path(path)
        self._first = tuple(first_columns)
        self.columns = list(first_columns)
        self._last_step: int | None = None
        if self.path.exists():
            self._rewrite_with_used_columns(self._records_kept())

    def _records_kept(self) -> list[dict[str, str]]:
        """Those of the file; one of which no whole row is one, as of a spreadsheet with semicolons, is kept beside."""
        records = csv_records(self.path)
        if not records and self.path.exists() and self.path.read_bytes().count(b"\n") > 1:
            names = (Path(f"{self.path}.unreadable{number or ''}") for number in itertools.count())
            kept = self.path.rename(next(name for name in names if not name.exists()))
            logger.warning("no row of %s can be read: it is kept as %s", self.path, kept.name)
        return records

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last_step is not None and step <= self._last_step:
            self.cut_back(step - 1)
        record = {"step": step, **metrics}
        new = [name for name in record if name not in self.columns]
        if new or not self._as_written():
            self.columns += new
            self._rewrite(self._records_kept())
        append_line(self.path, self._format([record]))
        self._last_step = step

    def _as_written(self) -> bool:
        """Whether nobody has removed the file, or saved it anew: then a row would stand under other names."""
        if not self.path.exists():
            return False
        with open(self.path, "rb") as file:
            if file.readline() != writable(self._format([dict(zip(self.columns, self.columns))])).encode():
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def cut_back(self, step: int) -> None:
        if self._last_step is not None and self._last_step <= step and self._as_written():
            return
        if self.path.exists():
            self._rewrite_with_used_columns([each for each in csv_records(self.path) if int(each["step"]) <= step])

    def _rewrite_with_used_columns(self, records: list[dict[str, str]]) -> None:
        """Columns that only later rows had go with them, so that the file is what it was at that step."""
        present = [name for record in records[:1] for name in record if name not in self._first]
        self.columns = [*self._first, *(name for name in present if any(record[name] for record in records))]
        self._rewrite(records)

    def _rewrite(self, records: list[dict[str, str]]) -> None:
        write_atomic(self.path, self._format([dict(zip(self.columns, self.columns)), *records]))
        self._last_step = int(records[-1]["step"]) if records else None

    def _format(self, records: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writerows(records)
        return text.getvalue()


def cut_jsonl(path: Path, step: float = math.inf) -> list[dict[str, Any]]:
    """Leave in a file of JSON lines, if it is there, the records up to a step. They are returned."""
    own = ((record, parse_step(record.get("step"))) for record in read_jsonl(path))
    records = [record for record, of in own if of is not None and of <= step]
    if path.exists():
        write_atomic(path, "".join(to_json(record) + "\n" for record in records))
    return records


class JsonlSink(Sink):
    """One JSON object a line, `step` first."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._last_step: int | None = None
        self.cut_back()

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._last_step is not None and step <= self._last_step:
            self.cut_back(step - 1)
        append_line(self.path, to_json({"step": step, **metrics}) + "\n")
        self._last_step = step

    def cut_back(self, step: float = math.inf) -> None:
        if self._last_step is not None and self._last_step <= step:
            return
        records = cut_jsonl(self.path, step)
        self._last_step = parse_step(records[-1]["step"]) if records else None


class TensorBoardSink(Sink):
    """Scalars for TensorBoard. `cut_back` opens a new event file whose purge mark hides the later steps."""

    def __init__(self, folder: str | Path):
        if importlib.util.find_spec("tensorboard") is None:
            raise missing("tensorboard")
        self._folder = str(folder)
        self._writer: Any = None
        self._last_step: int | None = None

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None or (self._last_step is not None and step < self._last_step):
            self._open(step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last_step = step

    def cut_back(self, step: int) -> None:
        self._open(step + 1)
        self._last_step = step

    def close(self, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=purge_step)


class WandbSink(Sink):
    """Weights & Biases, where the package is installed and the flag asks for it.

    WANDB_MODE=offline keeps everything on disk; WANDB_PROJECT names the project, WANDB_RUN_GROUP and WANDB_NAME group
    and run. The key comes from the environment or `wandb login` only. A resumed run is a new W&B run in the same group:
    W&B cannot take back steps that were logged. A run that the program has begun gets the metrics and goes on.
    """

    _begun: ClassVar[Any] = None  # the last run that one of them has begun

    def __init__(self, folder: str | Path, run_name: str, config: Mapping[str, Any] | None = None):
        if importlib.util.find_spec("wandb") is None:
            raise missing("wandb")
        import wandb

        Path(folder).mkdir(parents=True, exist_ok=True)
        if wandb.run is not None and wandb.run is WandbSink._begun:  # of a start that failed
            wandb.run.finish(exit_code=1)
        self._began = wandb.run is None
        try:
            self._run = wandb.run or wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "lightrft_visual",
                name=os.environ.get("WANDB_NAME") or run_name,
                group=os.environ.get("WANDB_RUN_GROUP") or run_name,
                dir=str(folder),
                config=dict(config or {}),
                # W&B would upload the command line as it is, secrets included; env.json holds it masked.
                settings={"x_disable_meta": True, "disable_git": True, "disable_code": True},
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"use_wandb: {error}. Set WANDB_API_KEY in the environment, or WANDB_MODE=offline"
            ) from error
        if self._began:  # the axes of another's run are its own
            WandbSink._begun = self._run
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, failed: bool = False) -> None:
        if self._began:
            self._run.finish(exit_code=int(failed))
