"""report.html: a run, or several, on one self-contained page that opens from disk and fetches nothing.

The page is made by the Jinja2 templates beside this file, which escape every text. Curves are drawn in the browser by
Bokeh, whose script is inside the page.
"""

import base64
import functools
import hashlib
import logging
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...data.bad_rows import FILE_NAME
from ...errors import DataError
from ...runtime.files import disk_problem, read_jsonl, write_atomic
from ...runtime.packages import needed
from .curves import PALETTE, ahead_panels, finite, number, reward_section, time_panel, training_section
from .data import RunData, Thumbnails, compared_settings, deviation_of, load_run, phase_times, taken_together
from .examples import examples_section, guard_section

logger = logging.getLogger(__name__)


HEADLINE = (
    ("evaluation", "eval_reward", "evaluation reward"),
    ("evaluation", "eval_reward_greedy", "evaluation, greedy"),
    ("evaluation", "eval_loss", "evaluation loss"),
    ("metrics", "reward_mean", "training reward"),
)
SHOWN, EXAMPLE_LENGTH = 5, 500
QUICK_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as quick, where PyYAML has it
COMPARED = {"eval_reward": "evaluation reward", "eval_reward_greedy": "greedy", "eval_loss": "evaluation loss"}
HIGHER = ("eval_reward", "eval_gold", "validation/reward/")  # beginnings of what is better where it is higher
LOWER = ("eval_loss", "eval_drift", "eval_invalid_share", "eval_bad_rows")


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


def tiles(run: RunData) -> list[tuple[str | None, str, str]]:
    """(value at the start, value now, what it is) of what a person looks for first."""
    times = phase_times(run.metrics)
    found = []
    for kind, name, label in HEADLINE:
        if points := getattr(run, kind).get(name):
            found.append((f"{points[0][1]:.3f}" if len(points) > 1 else None, f"{points[-1][1]:.3f}", label))
    if run.last_step is not None:
        found.append((None, str(run.last_step), "last step"))
    if times:
        found.append((None, duration(statistics.median(times.steps)), "median step"))
        found.append((None, duration(times.total), "in steps, in all"))
    return found


def evaluation_section(run: RunData) -> list[dict[str, Any]]:
    """First, last and highest value of each column, lowest where that is best; `sign`: of a gain, 0 where unknown."""
    kept = []
    for name, points in run.evaluation.items():
        sign = -1 if name in LOWER else int(name.startswith(HIGHER))
        step, value = (min if sign < 0 else max)(finite(points) or points, key=lambda point: point[1])
        found = {"first": points[0][1], "last": points[-1][1], "extreme": value, "step": int(step)}
        kept.append({"name": name, "sign": sign, **found})
    return kept


def time_section(run: RunData) -> dict[str, Any] | None:
    """Where a step's time goes, and what the step could be at best; None when no phase was timed."""
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
    limits = [("measured step", statistics.median(times.steps))]
    if "reward" in times.phases:
        limits.append(("if rewards ran beside everything else", times.limit_hiding("reward")))
    limits.append(("lower limit: all phases overlapped perfectly", times.limit_overlapped))
    found = {"phases": phases, "longest": longest, "rest": times.unaccounted, "limits": limits}
    return found | {"panel": time_panel(run), "ahead": ahead_panels(run)}


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
    """Headline values of runs side by side, how those ended that did not finish, and the settings in which they differ,
    [name, value in each run]."""
    entries, columns = [], [name for name in COMPARED if any(name in run.evaluation for run in runs)]
    has_alarms = any(run.alarms for run in runs)
    for index, run in enumerate(runs):
        times = phase_times(run.metrics)
        values = ["–" if run.last_step is None else str(run.last_step)]
        for name in columns:
            points = run.evaluation.get(name)
            deviation = deviation_of(run, name)
            values.append(f"{points[0][1]:.3f} → {points[-1][1]:.3f}{deviation}" if points else "–")
        values.append(duration(statistics.median(times.steps)) if times else "–")
        values += [str(len(run.alarms))] if has_alarms else []
        entries.append({"name": run.name, "color": color_of(index), "values": values})
    flats = [compared_settings(run) for run in runs]
    names = dict.fromkeys(name for flat in flats for name in flat)
    settings = [[name, *(str(flat.get(name, "–")) for flat in flats)] for name in names]
    differences = [each for each in settings if len(set(each[1:])) > 1]
    titles = ["steps", *(COMPARED[name] for name in columns), "median step", *["alarms"] * has_alarms]
    endings = [(run.name, end) for run in runs for end in run.ends if end["text"]]
    return {"rows": entries, "columns": titles, "endings": endings, "differences": differences}


MAX_BYTES = 10_000_000
IMAGE_BYTES = 6_000_000
LINE_BYTES = 2_000_000
POINT_BYTES = 24  # raw and smoothed


@dataclass
class Section:
    """A part of the page, drawn by the template of its kind."""

    kind: str
    label: str  # of its link at the top
    title: str
    content: Any


def printable(value: Any) -> Any:
    """None as nothing; control characters and lone surrogates, which HTML and UTF-8 cannot carry, as U+FFFD."""
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(
        c if (c >= " " or c in "\n\t") and not "\ud800" <= c <= "\udfff" and c != "\x7f" else "�" for c in value
    )


@functools.cache
def environment() -> Environment:
    """The templates, with autoescape on: only they make markup."""
    loader = PackageLoader("lightrft_visual.observe.report")
    made = Environment(
        loader=loader,
        autoescape=True,
        finalize=printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"duration": duration, "number": number}
    return made


@functools.cache
def script() -> tuple[str, str]:
    """The page's one script, Bokeh's with ours after it, and its hash as the page's security policy names it."""
    with needed("bokeh"):
        from bokeh.resources import Resources  # a third of a second, which a run need not wait for at its start

    library = Resources(mode="inline", components=["bokeh", "bokeh-api"], log_level="error").js_raw
    loader = environment().loader
    text = "\n".join([*library, loader.get_source(environment(), "charts.js")[0]])
    return text, f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _single_sections(run: RunData, image_bytes: int, points: int) -> Iterable[Section]:
    """The parts of the page of one run. points: drawn per line."""
    yield Section("reward", "Reward", "Reward", reward_section([run], points))
    yield Section("guard", "Guard", "Alarms of the guard", guard_section(run, Thumbnails(image_bytes // 4)))
    yield Section("evaluation", "Evaluation", "Evaluation", evaluation_section(run))
    yield Section("examples", "Examples", "Examples", examples_section(run, Thumbnails(image_bytes)))
    yield Section("training", "Training", "Training", training_section([run], points))
    yield Section("time", "Time per phase", "Time per phase", time_section(run))
    yield Section("bad_rows", "Left-out rows", "Rows left out of the data", left_out_section(run))
    yield Section("setup", "Set-up", "Set-up", setup_section(run))


def _several_sections(runs: Sequence[RunData], image_bytes: int, points: int) -> Iterable[Section]:
    """The parts of the page that compares runs; each run's examples get an equal share of the images' bytes."""
    yield Section("comparison", "Comparison", "Comparison", comparison_section(runs))
    yield Section("reward", "Reward", "Reward", reward_section(runs, points))
    yield Section("training", "Training", "Training", training_section(runs, points))
    single = [run for run in runs if not run.bands]
    for run in single:
        content = examples_section(run, Thumbnails(image_bytes // len(runs)), is_open=False)
        yield Section("examples", "Examples", f"Examples of {run.name}", content)
    for run in single:
        yield Section("time", "Time per phase", f"Time per phase of {run.name}", time_section(run))


def _build(runs: Sequence[RunData], title: str, image_bytes: int, points: int) -> str:
    """The whole page with at most `image_bytes` of images and `points` points a line."""
    alone = len(runs) == 1 and not runs[0].bands
    made = _single_sections(runs[0], image_bytes, points) if alone else _several_sections(runs, image_bytes, points)
    sections = [section for section in made if section.content]
    code, digest = script()
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            started=runs[0].environment.get("started") if alone else None,
            endings=[end for end in runs[0].ends if end["text"]] if alone else [],
            tiles=tiles(runs[0]) if alone else [],
            is_empty=all(run.is_empty for run in runs),
            sections=sections,
            links={section.kind: section.label for section in sections},
            script=Markup(code),
            digest=digest,
        )
    )


def distinct_names(runs: Sequence[RunData]) -> list[str]:
    """The runs' own names; of those that have the same their folders', with as many parents as tell all apart."""
    parts, count = [run.folder.resolve().parts for run in runs], Counter(run.name for run in runs)
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) if count[run.name] > 1 else run.name for run, part in zip(runs, parts)]
        if len(set(names)) == len(names):
            break
    return names


def write_report(
    folders: Sequence[str | Path], path: str | Path, title: str | None = None, by_seed: bool | None = None
) -> Path:
    """Write the page for one run's folder, or the comparison of several; below 10 MB.

    Args:
        folders: of runs; one that is given twice counts once.
        path: of the page.
        title: default: the names of the runs.
        by_seed: whether runs that differ in the seed alone are one line with a band; default: where they are three.

    Raises DataError for a folder that is no run. Runs that have only begun, or lost files, give the parts they have.
    """
    paths = {Path(folder).resolve(): Path(folder) for folder in folders}.values()
    if not paths:
        raise DataError("a report needs the folder of at least one run")
    runs = [load_run(folder) for folder in paths]
    for run, name in zip(runs, distinct_names(runs)):
        run.name = name
    runs = taken_together(runs, by_seed)
    title = title or " vs ".join(run.name for run in runs)
    lines = sum(len(run.metrics) + len(run.evaluation) for run in runs)
    points = max(40, min(400, LINE_BYTES // (POINT_BYTES * max(1, lines))))  # a line
    for scale in (1.0, 0.5, 0.2, 0.05):
        content = _build(runs, title, int(IMAGE_BYTES * scale), max(20, int(points * scale))).encode()
        if len(content) < MAX_BYTES:
            break
    try:
        write_atomic(Path(path), content)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {disk_problem(error) or error.strerror}") from error
    return Path(path)


REPORT = "report.html"
EVERY = 50  # steps between two reports at first
GROWTH = 1.1  # a long run's report takes longer to write, so each comes at a step at least this much later
SHORT = 1000  # steps of a run in which each evaluation and alarm is on the page at once


class ReportWriter:
    """Rewrites report.html of a run's folder: at evaluations, alarms and every `EVERY` steps, ever more rarely, and at
    the end.

    A report that cannot be written is logged with its traceback and never ends the run. active: whether this process
    writes at all; rank 0 of a run whose configuration asks for a report.
    """

    def __init__(self, folder: str | Path, active: bool):
        self.folder, self.active = Path(folder), active
        self.next_step = EVERY  # from which on a report is due, beside those of evaluations
        self._last_news = 0

    def write_due(self, step: int) -> None:
        """The report that is due at `next_step`; the next one comes enough steps later."""
        self.next_step = max(step + EVERY, int(step * GROWTH))
        self.write()

    def write_news(self, step: int) -> None:
        """The report after an evaluation or an alarm; late in a long run others are on the next page."""
        if step < SHORT or step >= self._last_news * GROWTH:
            self._last_news = step
            self.write()

    def write(self) -> Path | None:
        """Write the report of what the folder holds now; None where it is off or failed."""
        if not self.active:
            return None
        try:
            return write_report([self.folder], self.folder / REPORT)
        except Exception as error:
            problem = disk_problem(error)
            logger.error(
                "%s could not be written (%s); the run goes on", REPORT, problem or error, exc_info=not problem
            )
            return None
