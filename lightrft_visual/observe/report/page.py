"""report.html: a run, or several, on one self-contained page that opens from disk and fetches nothing.

The page is made by the Jinja2 templates beside this file, which escape every text. Curves are drawn in the browser by
Bokeh, whose script is inside the page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...errors import DataError
from ...runtime.files import write_atomic
from .charts import number
from .curves import reward_section, training_section
from .data import RunData, Thumbnails, load_run
from .examples import examples_section, guard_section
from .sections import (
    comparison_section,
    duration,
    evaluation_section,
    left_out_section,
    setup_section,
    tiles,
    time_section,
)

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
    from bokeh.resources import Resources  # a third of a second, which a run need not wait for at its start

    library = Resources(mode="inline", components=["bokeh", "bokeh-api"], log_level="error").js_raw
    loader = environment().loader
    text = "\n".join([*library, loader.get_source(environment(), "charts.js")[0]])
    return text, f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def single_sections(run: RunData, image_bytes: int, points: int) -> Iterable[Section]:
    """The parts of the page of one run. points: drawn per line."""
    yield Section("reward", "Reward", "Reward", reward_section([run], points))
    yield Section("guard", "Guard", "Alarms of the guard", guard_section(run, Thumbnails(image_bytes // 4)))
    yield Section("evaluation", "Evaluation", "Evaluation", evaluation_section(run))
    yield Section("examples", "Examples", "Examples", examples_section(run, Thumbnails(image_bytes)))
    yield Section("training", "Training", "Training", training_section([run], points))
    yield Section("time", "Time per phase", "Time per phase", time_section(run))
    yield Section("bad_rows", "Left-out rows", "Rows left out of the data", left_out_section(run))
    yield Section("setup", "Set-up", "Set-up", setup_section(run))


def several_sections(runs: Sequence[RunData], image_bytes: int, points: int) -> Iterable[Section]:
    """The parts of the page that compares runs; each run's examples get an equal share of the images' bytes."""
    yield Section("comparison", "Comparison", "Comparison", comparison_section(runs))
    yield Section("reward", "Reward", "Reward", reward_section(runs, points))
    yield Section("training", "Training", "Training", training_section(runs, points))
    for run in runs:
        content = examples_section(run, Thumbnails(image_bytes // len(runs)), is_open=False)
        yield Section("examples", "Examples", f"Examples of {run.name}", content)
    for run in runs:
        yield Section("time", "Time per phase", f"Time per phase of {run.name}", time_section(run))


def build(runs: Sequence[RunData], title: str, image_bytes: int, points: int) -> str:
    """The whole page with at most `image_bytes` of images and `points` points a line."""
    alone = len(runs) == 1
    made = single_sections(runs[0], image_bytes, points) if alone else several_sections(runs, image_bytes, points)
    sections = [section for section in made if section.content]
    code, digest = script()
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            started=runs[0].environment.get("started") if alone else None,
            tiles=tiles(runs[0]) if alone else [],
            is_empty=all(run.is_empty for run in runs),
            sections=sections,
            links={section.kind: section.label for section in sections},
            script=Markup(code),
            digest=digest,
        )
    )


def points_per_line(runs: Sequence[RunData]) -> int:
    """As many points as LINE_BYTES allow over all lines, 40 to 400."""
    lines = sum(len(run.metrics) + len(run.evaluation) for run in runs)
    return max(40, min(400, LINE_BYTES // (POINT_BYTES * max(1, lines))))


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as many parents as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({index})" for index, name in enumerate(names, start=1)]


def write_report(folders: Sequence[str | Path], path: str | Path, title: str | None = None) -> Path:
    """Write the page for one run's folder, or the comparison of several; below 10 MB.

    Raises DataError when a folder does not exist. Runs that have only begun, or lost files, give the parts they have.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise DataError("a report needs the folder of at least one run")
    runs = [load_run(folder, name) for folder, name in zip(paths, distinct_names(paths))]
    title = title or " vs ".join(run.name for run in runs)
    points = points_per_line(runs)
    for scale in (1.0, 0.5, 0.2, 0.05):
        content = build(runs, title, int(IMAGE_BYTES * scale), max(20, int(points * scale))).encode()
        if len(content) < MAX_BYTES:
            break
    write_atomic(Path(path), content)
    return Path(path)
