"""report.html: a run, or several, on one self-contained page that opens from disk and fetches nothing.

python -m lightrft_visual.report.page RUN_DIR [RUN_DIR2 …] -o report.html
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError
from ..observe.sinks import write_atomic
from .charts import PALETTE
from .curves import curves, reward_section, time_panel
from .data import PhaseTimes, Pictures, RunData, flat_config, load_run, phase_times
from .markup import Markup, join, table, tag
from .rollouts import rollouts, sheets
from .style import page

MAX_BYTES = 10_000_000
PICTURE_BYTES = 6_000_000
LINE_BYTES = 2_000_000
HEADLINE = ("eval_reward", "eval_reward_greedy")


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def tile(value: str, label: str, before: str | None = None) -> Markup:
    earlier = tag("span", f"{before} → ", class_="from") if before is not None else None
    return tag("div", tag("b", earlier, value), tag("span", label), class_="card tile")


def change_tile(points: Sequence[tuple[float, float]], label: str) -> Markup | None:
    if not points:
        return None
    first, last = points[0][1], points[-1][1]
    return tile(f"{last:.3f}", label, f"{first:.3f}" if len(points) > 1 else None)


def tiles(run: RunData) -> Markup:
    """The figures a person looks for first."""
    times = phase_times(run.metrics)
    found = [
        change_tile(run.evaluation.get("eval_reward", []), "evaluation reward"),
        change_tile(run.evaluation.get("eval_reward_greedy", []), "evaluation, greedy"),
        change_tile(run.metrics.get("reward_mean", []), "training reward"),
        tile(str(run.last_step), "last step") if run.last_step is not None else None,
        tile(duration(statistics.median(times.steps)), "median step") if times else None,
        tile(duration(times.total), "in steps, in all") if times else None,
    ]
    return tag("div", found, class_="tiles")


def share_bar(times: PhaseTimes) -> Markup:
    parts = []
    for index, name in enumerate(times.phases):
        style = f"width:{100 * times.share(name):.2f}%;background:{PALETTE[index % len(PALETTE)]}"
        parts.append(tag("i", style=style, title=f"{name} {times.share(name):.1%}"))
    rest = f"width:{100 * times.unaccounted:.2f}%;background:var(--line)"
    return tag("div", parts, tag("i", style=rest, title="not measured"), class_="share")


def phase_rows(times: PhaseTimes) -> list[list[Any]]:
    rows = []
    for index, (name, values) in enumerate(times.phases.items()):
        chip = tag("span", tag("i", style=f"background:{PALETTE[index % len(PALETTE)]}"), name, class_="chip")
        slow = sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]
        figures = (duration(statistics.median(values)), duration(slow), f"{times.share(name):.1%}")
        rows.append([chip, *(tag("td", figure, class_="n") for figure in figures)])
    rest = tag("td", f"{times.unaccounted:.1%}", class_="n")
    return [*rows, ["not in any phase", tag("td"), tag("td"), rest]]


def limit_rows(times: PhaseTimes) -> list[list[Any]]:
    """The measured step beside what it could be at best."""
    measured = statistics.median(times.steps)
    limits = [("measured step", measured)]
    if "reward" in times.phases:
        limits.append(("if rewards ran beside everything else", times.limit_hiding("reward")))
    limits.append(("lower limit: all phases overlapped perfectly", times.limit_overlapped))
    return [
        [
            name,
            tag("td", duration(value), class_="n"),
            tag("td", f"{measured / value:.2f}×" if value else "", class_="n"),
        ]
        for name, value in limits
    ]


def number_headers(*names: str) -> list[Markup]:
    return [tag("th", name, class_="n") for name in names]


def time_section(run: RunData, title: str = "Time per phase") -> Markup | None:
    times = phase_times(run.metrics)
    if times is None:
        return None
    longest = max(times.phases, key=times.share)
    words = (
        f"{longest} takes {times.share(longest):.0%} of the time. A step cannot be shorter than its longest phase; "
        "the second table shows how far the run is from that."
    )
    phases = table(["phase", *number_headers("median", "90th percentile", "share")], phase_rows(times))
    limits = table(["limit model", *number_headers("median", "gain")], limit_rows(times))
    left = tag("div", share_bar(times), phases, limits, class_="card")
    both = tag("div", left, time_panel(run), class_="two")
    return tag("section", tag("h2", title), tag("p", words, class_="soft"), both, id="time")


def evaluation_section(run: RunData) -> Markup | None:
    """First, best and last evaluation figure of each column."""
    rows = []
    for name, points in run.evaluation.items():
        first, last = points[0][1], points[-1][1]
        best_step, best = max(points, key=lambda point: point[1])
        change = last - first
        look = "n up" if change > 0 else "n down" if change < 0 else "n"
        cells = [tag("td", f"{value:.4g}", class_="n") for value in (first, last)]
        highest = tag("td", f"{best:.4g} at step {int(best_step)}", class_="n")
        rows.append([name, *cells, tag("td", f"{change:+.4g}", class_=look), highest])
    if not rows:
        return None
    header = ["figure", *number_headers("first", "last", "change", "highest")]
    return tag("section", tag("h2", "Evaluation"), tag("div", table(header, rows), class_="card"), id="evaluation")


def examples_section(run: RunData, pictures: Pictures, title: str, is_open: bool = True) -> Markup | None:
    parts = [sheets(run, pictures, is_open), rollouts(run, pictures, is_open)]
    if not any(parts):
        return None
    return tag("section", tag("h2", title), parts, id="examples")


def pairs_table(values: dict[str, Any]) -> Markup:
    texts = [(name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in values.items()]
    return table([], [[name, str(value)] for name, value in texts])


def setup_section(run: RunData) -> Markup | None:
    """Command, versions, hardware, configuration."""
    environment, blocks = run.environment, []
    if command := environment.get("command"):
        blocks.append(join([tag("h3", "Command"), tag("pre", shlex.join(map(str, command)))]))
    halves = []
    for name in ("hardware", "versions"):
        if isinstance(environment.get(name), dict):
            halves.append(tag("div", tag("h3", name.capitalize()), pairs_table(environment[name]), class_="card"))
    if halves:
        blocks.append(tag("div", halves, class_="two"))
    if run.config:
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        blocks.append(tag("details", tag("summary", "Configuration"), tag("pre", text)))
    return tag("section", tag("h2", "Set-up"), blocks, id="setup") if blocks else None


def comparison_section(runs: Sequence[RunData]) -> Markup:
    """Headline figures side by side, and the settings in which the runs differ."""
    rows = []
    for index, run in enumerate(runs):
        times = phase_times(run.metrics)
        chip = tag("span", tag("i", style=f"background:{PALETTE[index % len(PALETTE)]}"), run.name, class_="chip")
        figures = [run.last_step]
        for name in HEADLINE:
            points = run.evaluation.get(name, [])
            figures.append(f"{points[0][1]:.3f} → {points[-1][1]:.3f}" if points else None)
        figures.append(duration(statistics.median(times.steps)) if times else None)
        rows.append([chip, *(tag("td", "–" if figure is None else figure, class_="n") for figure in figures)])
    header = ["run", *number_headers("steps", "evaluation reward", "greedy", "median step")]
    parts = [tag("h2", "Comparison"), tag("div", table(header, rows), class_="card")]
    if differences := config_differences(runs):
        head = ["setting that differs", *(run.name for run in runs)]
        parts += [tag("h3", "Configuration"), tag("div", table(head, differences), class_="card")]
    return tag("section", parts, id="comparison")


def config_differences(runs: Sequence[RunData]) -> list[list[str]]:
    flats = [flat_config(run.config) for run in runs]
    names = dict.fromkeys(name for flat in flats for name in flat)
    rows = [[name, *(str(flat.get(name, "–")) for flat in flats)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1 and not row[0].startswith("output.")]


def header(runs: Sequence[RunData], title: str, sections: Sequence[tuple[str, str, Markup | None]]) -> Markup:
    started = runs[0].environment.get("started") if len(runs) == 1 else None
    links = [tag("a", label, href=f"#{anchor}") for anchor, label, content in sections if content]
    note = tag("p", f"started {started}", class_="soft small") if started else None
    return tag("header", tag("h1", title), note, tag("nav", links))


def build(runs: Sequence[RunData], title: str, picture_bytes: int, points: int) -> Markup:
    """The whole page with at most `picture_bytes` of pictures and `points` points a line."""
    if len(runs) == 1:
        sections = single_sections(runs[0], Pictures(picture_bytes), points)
    else:
        sections = several_sections(runs, picture_bytes, points)
    top = [tiles(runs[0])] if len(runs) == 1 else []
    if all(run.is_empty for run in runs):
        top = [tag("p", "Nothing has been recorded yet.", class_="soft")]
    footer = tag("footer", "lightrft_visual. This file is complete in itself: it loads nothing from the network.")
    return page(title, join([header(runs, title, sections), *top, *(content for *_, content in sections), footer]))


def single_sections(run: RunData, pictures: Pictures, points: int) -> list[tuple[str, str, Markup | None]]:
    return [
        ("reward", "Reward", reward_section([run], points)),
        ("evaluation", "Evaluation", evaluation_section(run)),
        ("examples", "Examples", examples_section(run, pictures, "Examples")),
        ("curves", "Training", curves([run], points)),
        ("time", "Time per phase", time_section(run)),
        ("setup", "Set-up", setup_section(run)),
    ]


def several_sections(runs: Sequence[RunData], picture_bytes: int, points: int) -> list[tuple[str, str, Markup | None]]:
    examples = [
        examples_section(run, Pictures(picture_bytes // len(runs)), f"Examples of {run.name}", is_open=False)
        for run in runs
    ]
    times = [time_section(run, f"Time per phase of {run.name}") for run in runs]
    return [
        ("comparison", "Comparison", comparison_section(runs)),
        ("reward", "Reward", reward_section(runs, points)),
        ("curves", "Training", curves(runs, points)),
        ("examples", "Examples", join(examples) or None),
        ("time", "Time per phase", join(times) or None),
    ]


def points_per_line(runs: Sequence[RunData]) -> int:
    """As many points as LINE_BYTES allow over all lines (twelve bytes a point, raw and smoothed), 40 to 400."""
    lines = sum(len(run.metrics) + len(run.evaluation) for run in runs)
    return max(40, min(400, LINE_BYTES // (24 * max(1, lines))))


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
        content = build(runs, title, int(PICTURE_BYTES * scale), max(20, int(points * scale))).encode()
        if len(content) < MAX_BYTES:
            break
    write_atomic(Path(path), content)
    return Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 2 when a folder does not exist."""
    parser = argparse.ArgumentParser(prog="python -m lightrft_visual.report.page", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("-o", "--output", default="report.html")
    parser.add_argument("--title")
    chosen = parser.parse_args(arguments)
    try:
        path = write_report(chosen.runs, chosen.output, chosen.title)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
