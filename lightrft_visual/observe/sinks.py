"""Where metrics go: CSV, JSON lines, TensorBoard, Weights & Biases.

Every sink takes `append(step, metrics)`, `cut_back(step)` (forget what was logged after that step) and `close()`.
Steps are unique and rise: a step that was logged before replaces that row and everything after it.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from ..runtime.files import append_line, read_jsonl, to_json, write_atomic

logger = logging.getLogger(__name__)

METRIC_COLUMNS = (
    "step", "reward_mean", "reward_std", "loss", "kl", "grad_norm", "clip_frac", "ratio_max_dev_first",
    "rollout_logp_diff_max", "response_length", "tokens", "time_generate", "time_reward", "time_forward", "time_train",
    "time_sync", "time_step",
)  # fmt: skip
EVAL_COLUMNS = ("step", "eval_reward", "eval_reward_greedy")


class Sink(Protocol):
    """What the run recorder writes to."""

    def append(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def cut_back(self, step: int) -> None: ...

    def close(self) -> None: ...


def column_name(name: str) -> str:
    """A metric's name on one line that every sink takes: other than printable characters become their escapes.

    Names hold labels and reward components, which are text of the data.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in name)


def parse_step(text: Any) -> int | None:
    """The step in a cell, None where it holds no whole number."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


class CsvSink:
    """One row a step. New columns may appear at any step: the file is then rewritten with the wider header."""

    def __init__(self, path: str | Path, first_columns: Sequence[str] = METRIC_COLUMNS):
        self.path = Path(path)
        self._first = tuple(first_columns)
        self.columns = list(first_columns)
        self._last_step: int | None = None
        if self.path.exists():
            self._rewrite_with_used_columns(self.records())

    def records(self) -> list[dict[str, str]]:
        """The complete rows on disk, as text; a torn last row and rows without a step number are left out."""
        if not self.path.exists():
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            header, *records = list(csv.reader(file)) or [[]]
        whole = [dict(zip(header, record)) for record in records if len(record) == len(header)]
        return [record for record in whole if parse_step(record.get("step")) is not None]

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last_step is not None and step <= self._last_step:
            self.cut_back(step - 1)
        record = {"step": step, **{column_name(name): value for name, value in metrics.items()}}
        new = [name for name in record if name not in self.columns]
        if new or not self.path.exists():
            self.columns += new
            self._rewrite(self.records())
        append_line(self.path, self._format([record]))
        self._last_step = step

    def cut_back(self, step: int) -> None:
        if self.path.exists():
            self._rewrite_with_used_columns([record for record in self.records() if int(record["step"]) <= step])

    def close(self) -> None:
        """Nothing is held open between rows."""

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


class JsonlSink:
    """One JSON object a line, `step` first."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._last_step: int | None = None
        self._rewrite([record for record in read_jsonl(self.path) if parse_step(record.get("step")) is not None])

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._last_step is not None and step <= self._last_step:
            self.cut_back(step - 1)
        append_line(self.path, to_json({"step": step, **metrics}) + "\n")
        self._last_step = step

    def cut_back(self, step: int) -> None:
        self._rewrite([record for record in read_jsonl(self.path) if record["step"] <= step])

    def close(self) -> None:
        """Nothing is held open between lines."""

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        if self.path.exists():
            write_atomic(self.path, "".join(to_json(record) + "\n" for record in records))
        self._last_step = records[-1]["step"] if records else None


class TensorBoardSink:
    """Scalars for TensorBoard. `cut_back` opens a new event file whose purge mark hides the later steps."""

    def __init__(self, folder: str | Path):
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("use_tensorboard needs the package tensorboard: pip install tensorboard")
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

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=purge_step)


class WandbSink:
    """Weights & Biases, where the package is installed and the flag asks for it.

    WANDB_MODE=offline keeps everything on disk, WANDB_PROJECT names the project; the key comes from the environment or
    `wandb login` only. A resumed run is a new W&B run in the same group: W&B cannot take back steps that were logged.
    """

    def __init__(self, folder: str | Path, run_name: str, config: Mapping[str, Any] | None = None):
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("use_wandb needs the package wandb: pip install wandb, or leave the flag out")
        import wandb

        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "lightrft_visual",
                name=run_name,
                group=run_name,
                dir=str(folder),
                config=dict(config or {}),
                # W&B would upload the command line as it is, secrets included; env.json holds it masked.
                settings={"x_disable_meta": True, "disable_git": True, "disable_code": True},
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"use_wandb: {error}. Set WANDB_API_KEY in the environment, or WANDB_MODE=offline"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def cut_back(self, step: int) -> None:
        """The steps that are repeated belong to the new W&B run; see the class."""

    def close(self) -> None:
        self._run.finish()
