"""The report's curves: which metrics stand in which panel, for one run and for several."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.media import evenly_spaced
from .data import RunData

PALETTE = (
    "#4269d0", "#e0711c", "#3ca951", "#c2407a", "#8a56e2", "#2a9d9d", "#b8860b", "#d1495b", "#6b8fb8", "#8d6e53",
)  # fmt: skip
STACKED_STEPS = 150  # that are drawn of areas
Point = tuple[float, float]
Chart = dict[str, Any]


@dataclass
class Series:
    """A named line. `smooth` draws the raw points faintly under a running mean; `dots` marks each point; band: (step,
    low, high) around it; `marker`: it shows where something was, and has no values to tell."""

    name: str
    points: Sequence[Point]
    color: str
    smooth: bool = False
    dots: bool = False
    band: Sequence[tuple[float, float, float]] | None = None
    marker: bool = False


def finite(points: Sequence[Point]) -> list[Point]:
    """The points without NaN and infinities."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """Mean over a window of a fifteenth of the points, 3 at least, around each, cut off at both ends."""
    reach = max(3, len(points) // 15) // 2
    steps, values = np.array(points, dtype=float).T
    sums, index = np.concatenate([[0.0], values.cumsum()]), np.arange(len(values))
    start, end = np.maximum(0, index - reach), np.minimum(len(values), index + reach + 1)
    return list(zip(steps.tolist(), ((sums[end] - sums[start]) / (end - start)).tolist()))


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` points: the smallest and largest of each stretch, so that spikes stay, and both ends."""
    if len(points) <= limit:
        return list(points)
    count = max(1, (limit - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for index in range(count):
        stretch = inner[index * len(inner) // count : (index + 1) * len(inner) // count]
        if stretch:
            kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [*kept, points[-1]]


def number(value: float) -> str:
    """Short text: 0.25, 1.2k, 3e-6."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e9:
        return re.sub(r"(?:\.0)?e\+?(-?)0?", r"e\1", f"{value:.1e}")
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def value_axis(values: Sequence[float]) -> tuple[float, float, bool]:
    """What the vertical axis shows, (low, high, whether it is logarithmic): everything but a few spikes.

    Logarithmic when the bulk of positive values spans more than a factor of 100; else without those spikes that would
    flatten the rest of the line.
    """
    low, near_low, bulk_low, bulk_high, near_high, high = np.quantile(values, (0, 0.02, 0.05, 0.95, 0.98, 1)).tolist()
    if low > 0 and bulk_high > 100 * bulk_low:
        return low / 1.5, high * 1.5, True
    body = near_high - near_low
    if body > 0 and (high - low) > 4 * body:
        low, high = max(low, near_low - body), min(high, near_high + body)
    margin = 0.06 * (high - low) if high - low > 1e-9 * abs(high) else 0.1 * abs(high) or 0.5
    return low - margin, high + margin, False


def columns(points: Sequence[Point]) -> dict[str, list[float]]:
    """Steps as x and values as y, in five digits."""
    return {"x": [int(x) if x == int(x) else x for x, _ in points], "y": [float(f"{y:.5g}") for _, y in points]}


def band_columns(band: Sequence[tuple[float, float, float]], limit: int) -> dict[str, list[float]]:
    """Steps as x, and both edges; at most `limit` steps, evenly chosen, with both ends."""
    kept = evenly_spaced(band, limit)
    low, high = columns([(x, y) for x, y, _ in kept]), columns([(x, y) for x, _, y in kept])
    return {"x": low["x"], "low": low["y"], "high": high["y"]}


def step_range(steps: Sequence[float]) -> list[float]:
    """First and last step; a single one gets room on both sides."""
    low, high = min(steps), max(steps)
    return [low, high] if low < high else [low - 0.5, high + 0.5]


def line_chart(series: Sequence[Series], limit: int = 300) -> Chart | None:
    """A chart of series; None without a finite point. Those of more than `limit` points are drawn at the same steps."""
    drawn = [(item, points) for item in series if (points := finite(item.points))]
    if not drawn:
        return None
    share = limit // max(1, sum(len(points) > limit for _, points in drawn))
    kept = {x for _, points in drawn for x, _ in (thin(points, share) if len(points) > limit else points)}
    lines = []
    for item, points in drawn:
        smooth = item.smooth and len(points) > 8
        line = {"name": item.name, "color": item.color, "dots": item.dots or len(points) == 1, "marker": item.marker}
        line |= columns([point for point in (running_mean(points) if smooth else points) if point[0] in kept])
        line |= {"band": band_columns(item.band, limit)} if item.band else {}
        lines.append(line | ({"raw": columns([point for point in points if point[0] in kept])} if smooth else {}))
    everything = [point for _, points in drawn for point in points]
    everything += [(step, y) for item, _ in drawn for step, *ends in item.band or () for y in ends]
    low, high, log = value_axis([y for _, y in everything])
    return {"lines": lines, "x": step_range([x for x, _ in everything]), "y": [low, high], "log": log}


def area_chart(series: Sequence[Series]) -> Chart | None:
    """Series stacked on each other, such as the phases of a step; None without any finite point. A step that one of
    them lacks counts as 0 there."""
    tables = [dict(finite(item.points)) for item in series]
    steps = sorted({step for table in tables for step in table})
    if not steps:
        return None
    shown = evenly_spaced(steps, STACKED_STEPS)
    lines = [
        {"name": item.name, "color": item.color, **columns([(step, max(0.0, table.get(step, 0.0))) for step in shown])}
        for item, table in zip(series, tables)
    ]
    _, high, _ = value_axis([sum(max(0.0, table.get(step, 0.0)) for table in tables) for step in steps])
    return {"lines": lines, "x": step_range(steps), "y": [0, high], "log": False, "stacked": True}


EVAL_FIRST = ("eval_reward", "eval_reward_greedy")
SECTIONS: dict[str, tuple[str, ...]] = {
    "Optimization": (
        "loss", "policy_loss", "critic_loss", "value_loss", "kl", "approx_kl", "kl_loss", "entropy", "grad_norm",
        "clip_frac", "value_clip_frac", "learning_rate", "critic_learning_rate", "skipped_steps",
    ),
    "Rollout and trainer agree?": (
        "rollout_logp_diff_max", "rollout_logp_diff", "parity", "ratio_max_dev_first", "ratio_max_dev", "tis_weight",
    ),
    "Responses and groups": (
        "response_length", "truncated_share", "tokens", "group_size", "zero_std_ratio", "reward_std_mean",
        "trained_prompt_num", "reward_invalid_share", "time_step",
    ),
}  # fmt: skip
# Bookkeeping of the reward engine: shown with the other metrics, not beside the rewards themselves.
REWARD_COUNTS = ("/failures", "/not_applicable", "/invalid_share", "/time")
ALWAYS = ("loss", "kl", "time_step")  # shown even when they never change
MAX_REWARDS = 12
MAX_OTHER = 80
KINDS_A_PANEL = 8
SHARED = re.compile("^eval_reward_(?:greedy_)?")  # what names of labels' columns begin with
RESPONSES = {"answer": "answers", "drawing": "drawn images"}  # of a model that gives both


@dataclass
class Panel:
    """A chart with its title, the last value where there is one line, and a legend unless the title names the line."""

    title: str
    chart: Chart
    note: str
    legend: list[tuple[str, str]]  # (name, colour)


def _panel(title: str, series: Sequence[Series], limit: int, stacked: bool = False) -> Panel | None:
    """The panel of a chart's series; None where they have no finite point. limit: points drawn per line."""
    chart = area_chart(series) if stacked else line_chart(series, limit)
    if chart is None:
        return None
    note = number(series[0].points[-1][1]) if len(series) == 1 and not stacked else ""
    named = [(item.name, item.color) for item in series]
    return Panel(title, chart, note, named if [item.name for item in series] != [title] else [])


Line = tuple[str, Sequence[Point] | None, dict[str, Any]]  # name, points, how it is drawn


def series_of(lines: Sequence[Line]) -> list[Series]:
    """Of the lines that have points, in the order of the colours."""
    known = [line for line in lines if line[1]]
    return [
        Series(name, points, PALETTE[index % len(PALETTE)], **how) for index, (name, points, how) in enumerate(known)
    ]


def _metric_panel(name: str, runs: Sequence[RunData], limit: int, kind: str = "metrics") -> Panel | None:
    """One metric of every run that has it. kind: "metrics" of training steps or "evaluation"."""
    sources = [(run, getattr(run, kind).get(name)) for run in runs]
    dots = kind == "evaluation"
    series = [
        Series(
            run.name if len(runs) > 1 else name,
            points,
            PALETTE[index % len(PALETTE)],
            not dots and not run.bands,
            dots,
            run.bands.get(kind, {}).get(name),
        )
        for index, (run, points) in enumerate(sources)
        if points
    ]
    return _panel(name, series, limit)


def lines_of(run: RunData, lines: Sequence[tuple[str, str, str]]) -> list[Series]:
    """Those that the run has. lines: (label, "metrics" of training steps or "evaluation", column)."""
    styles = {"metrics": {"smooth": True}, "evaluation": {"dots": True}}
    return series_of([(label, getattr(run, kind).get(column), styles[kind]) for label, kind, column in lines])


def gold_panel(run: RunData, limit: int) -> Panel | None:
    """Reward and gold, of rollouts and of evaluations, with the point where they parted; None without gold."""
    if not (run.metrics.get("gold") or run.evaluation.get("eval_gold")):
        return None
    training = ("reward, training", "metrics", "reward_mean"), ("gold, training", "metrics", "gold")
    evaluated = ("reward, evaluation", "evaluation", "eval_reward"), ("gold, evaluation", "evaluation", "eval_gold")
    series = lines_of(run, (*training, *evaluated))
    diverged = [int(each["since"]) for each in run.alarms if each.get("signal") in ("gold", "eval_gold")]
    if diverged:
        values = [y for each in series for _, y in finite(each.points)]
        line = [(diverged[0], min(values)), (diverged[0], max(values))]
        series.append(Series(f"parted at step {diverged[0]}", line, PALETTE[7], marker=True))
    return _panel("reward against gold", series, limit)


def reward_panels(run: RunData, limit: int) -> list[Panel | None]:
    """Training reward and evaluation reward on the same axes, reward and gold, and of a model that also draws reward
    and gold of its answers and of its images, each in a panel."""
    lines = [("training", "metrics", "reward_mean"), ("evaluation", "evaluation", "eval_reward")]
    lines.append(("evaluation, greedy", "evaluation", "eval_reward_greedy"))
    panels = [_panel("reward", lines_of(run, lines), limit), gold_panel(run, limit)]
    for kind, title in RESPONSES.items() if draws(run) else ():
        own = [("training", "metrics", f"reward_{kind}_mean")]
        for name, column in (("", "eval_reward"), (", greedy", "eval_reward_greedy"), (", gold", "eval_gold")):
            own.append((f"evaluation{name}", "evaluation", f"{column}_{kind}"))
        panels.append(_panel(f"reward of {title}", lines_of(run, own), limit))
    return panels


def draws(run: RunData) -> bool:
    """Whether the run's model answers by images as well as by text."""
    return any(f"entropy_{kind}" in run.metrics for kind in RESPONSES)


def response_metrics(run: RunData, limit: int) -> dict[str, Panel]:
    """Metrics that the run has of answers and of images apart, both in one panel; by the metric's name."""
    found = {}
    for name in (each.removesuffix("_answer") for each in run.metrics if each.endswith("_answer")):
        columns = {title: run.metrics.get(f"{name}_{kind}") for kind, title in RESPONSES.items()}
        if all(columns.values()):
            series = series_of([(title, points, {}) for title, points in columns.items()])
            found[name] = _panel(f"{name}, by kind of response", series, limit)
    return {name: each for name, each in found.items() if each is not None}


def kinds_panels(run: RunData, limit: int) -> list[Panel | None]:
    """Evaluation metrics apart from the two totals, greedy ones in panels of their own, eight lines a panel."""
    shown = {f"{name}_{kind}" for kind in RESPONSES for name in (*EVAL_FIRST, "eval_gold")} if draws(run) else set()
    names = [name for name in run.evaluation if name not in (*EVAL_FIRST, *shown)]
    greedy = [name for name in names if name.startswith("eval_reward_greedy_")]
    sampled = [name for name in names if name not in greedy]
    panels = []
    for title, group in (("evaluation, by kind", sampled), ("evaluation, greedy, by kind", greedy)):
        for start in range(0, len(group), KINDS_A_PANEL):
            some = group[start : start + KINDS_A_PANEL]
            lines = [(SHARED.sub("", name), run.evaluation[name], {"dots": True}) for name in some]
            panels.append(_panel(title, series_of(lines), limit))
    return panels


def time_panel(run: RunData) -> Panel | None:
    """Seconds of each phase stacked."""
    names = [name for name in run.metrics if name.startswith("time_") and name != "time_step"]
    names = [name for name in names if any(value > 0 for _, value in run.metrics[name])]
    series = series_of([(name[5:], run.metrics[name], {}) for name in names])
    return _panel("seconds a step, by phase", series, 0, stacked=True)


def ahead_panels(run: RunData) -> list[Panel]:
    """Of rollouts that run ahead of the trainer: the shares of tokens by their age, who waits, and what is in stock."""
    ages = sorted(
        (name for name in run.metrics if name.startswith("staleness_") and name[10:].isdigit()),
        key=lambda name: int(name[10:]),
    )
    by_age = series_of([(f"{name[10:]} versions old", run.metrics[name], {}) for name in ages])
    rest = ("idle_trainer", "idle_engines", "buffer_level", "dropped_stale_share") if ages else ()
    stacked = _panel("share of tokens or samples, by age", by_age, 0, stacked=True) if ages else None
    return present([stacked, *(_metric_panel(name, [run], 300) for name in rest)])


def columns_of(runs: Sequence[RunData], kind: str = "metrics") -> list[str]:
    """Names that any run has, in order of appearance."""
    return list(dict.fromkeys(name for run in runs for name in getattr(run, kind)))


def reward_names(runs: Sequence[RunData]) -> list[str]:
    """Mean rewards, shown in the reward section: reward_mean, components reward/<name>, mean_reward_<percent>."""
    parts = ("reward/", "mean_reward_")
    named = [name for name in columns_of(runs) if name.startswith(parts) and not name.endswith(REWARD_COUNTS)]
    return [name for name in columns_of(runs) if name == "reward_mean" or name in named][:MAX_REWARDS]


def present(panels: Sequence[Panel | None]) -> list[Panel]:
    """The panels that have a chart."""
    return [each for each in panels if each is not None]


def reward_section(runs: Sequence[RunData], limit: int) -> list[Panel]:
    """Did it learn: training and evaluation reward, and their parts."""
    names = reward_names(runs)
    if len(runs) == 1 and not runs[0].bands:
        run = runs[0]
        panels = [*reward_panels(run, limit), *kinds_panels(run, limit)]
        names = [name for name in names if name != "reward_mean"]
    else:
        panels = [_metric_panel(name, runs, limit, "evaluation") for name in columns_of(runs, "evaluation")]
    return present([*panels, *(_metric_panel(name, runs, limit) for name in names)])


def training_section(runs: Sequence[RunData], limit: int) -> dict[str, Any] | None:
    """All other panels, grouped; rare columns are folded away, and those that never change listed in one line."""
    names = columns_of(runs)
    steady = {name: value for name in names if (value := constant(name, runs)) is not None and name not in ALWAYS}
    used, groups = {*reward_names(runs), *steady}, []
    for title, wanted in SECTIONS.items():
        chosen = [name for name in wanted if name in names and name not in steady]
        used.update(chosen)
        groups.append((title, present([_metric_panel(name, runs, limit) for name in chosen])))
    apart = response_metrics(runs[0], limit) if len(runs) == 1 else {}
    used |= {f"{name}_{kind}" for name in apart for kind in RESPONSES}
    used |= {f"reward_{kind}_{part}" for kind in RESPONSES for part in ("mean", "std")} if apart else set()
    groups.append(("By kind of response", list(apart.values())))
    others = [name for name in names if name not in used and not (len(runs) == 1 and name.startswith("time_"))]
    found = {
        "groups": [(title, panels) for title, panels in groups if panels],
        "others": present([_metric_panel(name, runs, limit) for name in others[:MAX_OTHER]]),
        "left_out": others[MAX_OTHER:],
        "steady": steady,
    }
    return found if any(found.values()) else None


def constant(name: str, runs: Sequence[RunData]) -> float | None:
    """The value of a metric that never changes over at least three steps; None for every other."""
    values = [value for run in runs for _, value in run.metrics.get(name, [])]
    return values[0] if len(values) >= 3 and len(set(values)) == 1 else None
