"""The data of line and area charts; templates/charts.js draws them in the browser with Bokeh."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PALETTE = (
    "#4269d0", "#e0711c", "#3ca951", "#c2407a", "#8a56e2", "#2a9d9d", "#b8860b", "#d1495b", "#6b8fb8", "#8d6e53",
)  # fmt: skip
Point = tuple[float, float]
Chart = dict[str, Any]


@dataclass
class Series:
    """A named line. `smooth` draws the raw points faintly under a running mean; `dots` marks each point."""

    name: str
    points: Sequence[Point]
    color: str
    smooth: bool = False
    dots: bool = False


def finite(points: Sequence[Point]) -> list[Point]:
    """The points without NaN and infinities."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def running_mean(points: Sequence[Point], span: int | None = None) -> list[Point]:
    """Mean over a window of `span` points around each (default: a fifteenth of them), cut off at both ends."""
    reach = (max(3, len(points) // 15) if span is None else span) // 2
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


def step_range(steps: Sequence[float]) -> list[float]:
    """First and last step; a single one gets room on both sides."""
    low, high = min(steps), max(steps)
    return [low, high] if low < high else [low - 0.5, high + 0.5]


def line_chart(series: Sequence[Series], limit: int = 300) -> Chart | None:
    """A chart of all series on common axes; None without any finite point. `limit`: points drawn per line."""
    drawn = [(item, points) for item in series if (points := finite(item.points))]
    if not drawn:
        return None
    lines = []
    for item, points in drawn:
        smooth = item.smooth and len(points) > 8
        line = {"name": item.name, "color": item.color, "dots": item.dots or len(points) == 1}
        line |= columns(thin(running_mean(points) if smooth else points, limit))
        lines.append(line | ({"raw": columns(thin(points, limit))} if smooth else {}))
    everything = [point for _, points in drawn for point in points]
    low, high, log = value_axis([y for _, y in everything])
    return {"lines": lines, "x": step_range([x for x, _ in everything]), "y": [low, high], "log": log}


def area_chart(series: Sequence[Series], limit: int = 150) -> Chart | None:
    """Series stacked on each other, such as the phases of a step; None without any finite point.

    A step that one of them lacks counts as 0 there. `limit`: steps drawn, evenly spaced.
    """
    tables = [dict(finite(item.points)) for item in series]
    steps = sorted({step for table in tables for step in table})
    if not steps:
        return None
    count = min(limit, len(steps))
    shown = [steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)]
    lines = [
        {"name": item.name, "color": item.color, **columns([(step, max(0.0, table.get(step, 0.0))) for step in shown])}
        for item, table in zip(series, tables)
    ]
    _, high, _ = value_axis([sum(max(0.0, table.get(step, 0.0)) for table in tables) for step in steps])
    return {"lines": lines, "x": step_range(steps), "y": [0, high], "log": False, "stacked": True}
