"""What a person sees while a run goes on: a progress bar, a line a step, a table of a good and a bad sample."""

import heapq
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import writable
from ..runtime.collectives import rank
from ..runtime.files import Escaped
from ..runtime.start_up import screen
from .metrics import column_name
from .recorder import Record, best_and_worst

SHOWN = (
    ("reward_mean", "reward"), ("loss", "loss"), ("kl", "kl"), ("grad_norm", "grad"), ("clip_frac", "clip"),
    ("response_length", "len"), ("rollout_logp_diff_max", "Δlogp"),
)  # fmt: skip
TABLE_EVERY = 10  # steps
MAX_TEXT = 300
MOST_COMPONENTS = 4
COMPONENT = re.compile(r"(?!(?:invalid_share|time)$)[^/]+")  # what stands beside them counts and times them
CONTROL_TOKENS = re.compile(r"<\|[^|<>\s]{1,40}\|>")  # such as <|im_start|> and <|image_pad|>


def short(value: float) -> str:
    """A number in at most about seven characters."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.1e}"


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """`step 12/150  reward 0.53±0.44  loss 0.01  …  1.2s (generate 40% train 35%)`; absent metrics are left out.

    Args:
        step: how many are finished.
        total: steps of the run; None: not known.
        metrics: of the step, by the names of metrics.csv.
    """
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    for name, label in SHOWN:
        if name in metrics:
            deviation = f"±{short(metrics['reward_std'])}" if name == "reward_mean" and "reward_std" in metrics else ""
            parts.append(f"{label} {short(metrics[name])}{deviation}")
        if name == "reward_mean":
            named = [each for each in metrics if each.startswith("reward/") and COMPONENT.fullmatch(each[7:])]
            parts += [f"{each[7:]} {short(metrics[each])}" for each in named[:MOST_COMPONENTS] if len(named) > 1]
    phases = {n[5:]: float(s) for n, s in metrics.items() if n.startswith("time_") and n != "time_step"}
    seconds = float(metrics.get("time_step", sum(phases.values())))
    if seconds > 0:
        largest = heapq.nlargest(3, phases, key=phases.__getitem__)
        shares = " ".join(f"{name} {phases[name] / seconds:.0%}" for name in largest if phases[name] > 0)
        if metrics.get("tokens", 0) > 0:
            parts.append(f"{short(float(metrics['tokens']) / seconds)} tok/s")
        parts.append(f"{seconds:.2f}s" + (f" ({shares})" if shares else ""))
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """`1:52`, `2:03:20`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clip_text(text: Any) -> str:
    """Printable, on one line, at most MAX_TEXT characters, without the control tokens of chat templates: a response may
    hold control characters."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "�" for c in str(text)).split())
    line = " ".join(CONTROL_TOKENS.sub(" ", line).split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def spoken(record: Record) -> Any:
    """The response, or of an episode all that was said: `answer ⏎ (image) observation ⏎ answer`."""
    if not record.get("turns"):
        return record.get("response")
    said = []
    for turn in record["turns"]:
        said.append(turn["text"])
        parts = [part for message in turn.get("observation", ()) for part in message["content"]]
        said += [" ".join(part.get("text", f"({part['type']})") for part in parts)] if parts else []
    return " ⏎ ".join(said)


class RunConsole:
    """Progress on rank 0; silent on the others.

    On a terminal a bar stays at the bottom and lines scroll above it; elsewhere (a log file) plain lines are written.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        line_every: int = 1,
        table_every: int = TABLE_EVERY,
        stream: TextIO | None = None,
        active: bool | None = None,
        title: str = "",
    ):
        """`table_every`: 0 turns the table off. `title`: before each line, of steps that are not the run's own."""
        self.total = total_steps
        self.line_every = line_every
        self.table_every = table_every
        self.title = title
        self.active = rank() == 0 if active is None else active
        self.output = Escaped(stream or screen(), endures=True)
        self._console = Console(file=cast(TextIO, self.output), highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._began, self._resumed_at = time.monotonic(), 0
        self._first: tuple[int, float] | None = None  # step finished first, and when

    def begin(self, step: int = 0) -> None:
        """Show the bar, where a run begins or a resumed one continues. `step` counts finished steps."""
        self._resumed_at = step
        self._start_bar(step)

    def _start_bar(self, step: int) -> None:
        if not (self.active and self._console.is_terminal):
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[cyan]{task.fields[left]}"))
        text = TextColumn("[bold]{task.description}")
        self._progress = Progress(text, *columns, console=self._console, transient=True)
        self._task = self._progress.add_task(self.title or "training", total=self.total, completed=step, left="")
        self._progress.start()
        self._console.show_cursor()  # which a process that is killed would leave hidden

    def message(self, text: str) -> None:
        """One line."""
        if self.active:
            self._console.print(writable(text), markup=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar and write the step's line. `step` counts finished steps."""
        if not self.active:
            return
        now, left = time.monotonic(), ""
        self._first = self._first or (step, now)  # of this process
        done, since = step - self._first[0], now - self._first[1]
        if self.total and done and step < self.total:  # by the pace so far, evaluations and checkpoints included
            left = f"  {clock(since / done * (self.total - step))} left"
        if self._progress is None:
            self._start_bar(step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, left=left)
        if step % self.line_every == 0 or step == self.total:
            self.message(f"{self.title} {step_line(step, self.total, metrics)}{left}".lstrip())

    def done(
        self, step: int, metrics: Mapping[str, float], first: Mapping[str, float], files: Mapping[str, Any]
    ) -> None:
        """The last line of a run that ends well.

        Args:
            step: how many are finished.
            metrics: of the last evaluation; empty: there was none.
            first: metrics of the first evaluation.
            files: paths of what the run leaves, by the name that the line gives them.
        """
        own = max(step - self._resumed_at, 0)  # the time is of this process
        steps = f"step {step}, {own} step{'s' * (own != 1)}" if self._resumed_at else f"{step} steps"
        parts = [f"done: {steps} in {clock(time.monotonic() - self._began)}"]
        for name in ("eval_reward", "eval_loss"):
            if name in metrics:
                before = f"{short(first[name])} -> " if name in first else ""
                parts.append(f"{name.replace('_', ' ')} {before}{short(metrics[name])}")
        self.message("; ".join([*parts, *(f"{name} {path}" for name, path in files.items())]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line with every evaluation metric."""
        listed = "  ".join(f"{column_name(n)} {short(float(value))}" for n, value in metrics.items() if n != "step")
        self.message(f"evaluation at step {step}: {listed}")

    def samples(self, step: int, records: Sequence[Record]) -> None:
        """Every `table_every` steps: the best and the worst of the records in a table."""
        if not self.active or self.table_every <= 0 or step % self.table_every:
            return
        best, worst = best_and_worst(records, 1)
        table = Table(title=f"step {step}", title_justify="left", show_lines=True)
        for name in ("", "reward", "prompt", "response", "reference"):
            table.add_column(name, overflow="fold")
        for kind, found in (("good", best), ("bad", worst)):
            for record in found:
                texts = [record.get("prompt"), spoken(record), record.get("reference")]
                cells = [escape(clip_text("" if text is None else text)) for text in texts]
                table.add_row(kind, short(float(record["reward"])), *cells)
        if table.row_count:
            self._console.print(table, soft_wrap=False)

    def close(self) -> None:
        """Remove the bar; lines stay."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
