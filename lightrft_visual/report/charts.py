"""Line and area charts as inline SVG."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .markup import Markup, tag

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 24
PALETTE = (
    "#4269d0", "#e0711c", "#3ca951", "#c2407a", "#8a56e2", "#2a9d9d", "#b8860b", "#d1495b", "#6b8fb8", "#8d6e53",
)  # fmt: skip
Point = tuple[float, float]


@dataclass
class Series:
    """A named line. `smooth` draws the raw points faintly under a running mean; `dots` marks each point."""

    name: str
    points: Sequence[Point]
    color: str
    smooth: bool = False
    dots: bool = False
    hidden_legend: bool = False


@dataclass
class Axis:
    """A linear or logarithmic scale from data to pixels."""

    low: float
    high: float
    start: float  # pixel of `low`
    end: float  # pixel of `high`
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def place(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        value = math.log10(value) if self.log else value
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def running_mean(points: Sequence[Point], span: int | None = None) -> list[Point]:
    """Mean over a window of `span` points around each (default: a fifteenth of them), cut off at both ends."""
    reach = (max(3, len(points) // 15) if span is None else span) // 2
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    smoothed = []
    for index, (x, _) in enumerate(points):
        start, end = max(0, index - reach), min(len(points), index + reach + 1)
        smoothed.append((x, (sums[end] - sums[start]) / (end - start)))
    return smoothed


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


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between low and high: steps of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


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


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """What the axis shows: everything, unless a few spikes would flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    near_low, near_high = ordered[int(0.02 * (len(ordered) - 1))], ordered[math.ceil(0.98 * (len(ordered) - 1))]
    body = near_high - near_low
    if body > 0 and (high - low) > 4 * body:
        low, high = max(low, near_low - body), min(high, near_high + body)
    return low, high


def value_axis(values: Sequence[float], zero: bool = False) -> Axis:
    """The vertical axis; logarithmic when the bulk of positive values spans more than a factor of 100."""
    ordered = sorted(values)
    bulk_low, bulk_high = ordered[int(0.05 * (len(ordered) - 1))], ordered[math.ceil(0.95 * (len(ordered) - 1))]
    if ordered[0] > 0 and bulk_high > 100 * bulk_low:
        low, high = math.floor(math.log10(ordered[0])), math.ceil(math.log10(ordered[-1]))
        ticks = [10.0**power for power in range(low, high + 1, max(1, math.ceil((high - low) / 5)))]
        return Axis(10.0**low, 10.0**high, HEIGHT - BOTTOM, TOP, True, ticks)
    low, high = value_range(values)
    low = min(low, 0.0) if zero else low
    if high - low <= 1e-9 * abs(high):
        pad = abs(high) * 0.1 or 0.5
        low, high = low - pad, high + pad
    pad = 0.06 * (high - low)
    low, high = (low if zero and low == 0 else low - pad), high + pad
    return Axis(low, high, HEIGHT - BOTTOM, TOP, False, nice_ticks(low, high))


def step_axis(steps: Sequence[float]) -> Axis:
    low, high = min(steps), max(steps)
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = [tick for tick in nice_ticks(low, high) if tick == int(tick)] or [low]
    return Axis(low, high, LEFT, WIDTH - RIGHT, False, ticks)


def grid(x: Axis, y: Axis) -> list[Markup]:
    """Tick lines and their labels."""
    parts = []
    for tick in y.ticks:
        level = round(y.place(tick), 1)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=level, y2=level, class_="grid"))
        parts.append(tag("text", number(tick), x=LEFT - 6, y=level + 3.5, text_anchor="end"))
    for tick in x.ticks:
        column = round(x.place(tick), 1)
        parts.append(tag("text", number(tick), x=column, y=HEIGHT - 7, text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    return parts


def coordinates(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """Pixels of the points; what lies beyond the axis is pinned a little outside it."""
    pairs = []
    for step, value in points:
        if y.log and value <= 0:
            continue
        level = min(max(y.place(value), TOP - 4), HEIGHT - BOTTOM + 4)
        pairs.append(f"{x.place(step):.1f},{level:.2f}")
    return " ".join(pairs)


def draw(series: Series, x: Axis, y: Axis, limit: int) -> list[Markup]:
    points = finite(series.points)
    if not points:
        return []
    style = {"stroke": series.color, "fill": "none"}
    parts = []
    main = points
    if series.smooth and len(points) > 8:
        raw = coordinates(thin(points, limit), x, y)
        parts.append(tag("polyline", points=raw, class_="raw", **style))
        main = running_mean(points)
    label = {"data_name": series.name, "data_color": series.color}
    main_points = coordinates(thin(main, limit), x, y)
    parts.append(tag("polyline", points=main_points, class_="main", **style, **label))
    if series.dots or len(points) == 1:
        for pair in coordinates(thin(points, 60), x, y).split():
            across, level = pair.split(",")
            parts.append(tag("circle", cx=across, cy=level, r=3, fill=series.color))
    return parts


def frame(x: Axis, y: Axis, content: list[Markup], label: str) -> Markup:
    scale = {"data_x0": x.low, "data_x1": x.high, "data_y0": y.low, "data_y1": y.high, "data_log": y.log or None}
    box = f"0 0 {WIDTH} {HEIGHT}"
    cursor = tag("line", x1=-9, x2=-9, y1=TOP, y2=HEIGHT - BOTTOM, class_="cursor")
    parts = [*grid(x, y), *content, cursor]
    return tag("svg", parts, viewBox=box, class_="chart", role="img", aria_label=label, **scale)


def line_chart(series: Sequence[Series], label: str, limit: int = 300, zero: bool = False) -> Markup | None:
    """A chart of all series on common axes; None without any finite point. `limit`: points drawn per line."""
    drawn = [item for item in series if finite(item.points)]
    if not drawn:
        return None
    everything = [point for item in drawn for point in finite(item.points)]
    x, y = step_axis([point[0] for point in everything]), value_axis([point[1] for point in everything], zero)
    content = [part for item in drawn for part in draw(item, x, y, limit)]
    return frame(x, y, content, label)


def area_chart(series: Sequence[Series], label: str, limit: int = 150) -> Markup | None:
    """Series stacked on each other, such as the phases of a step. They share their steps; None without any."""
    steps = sorted({x for item in series for x, _ in finite(item.points)})
    if not steps:
        return None
    below = dict.fromkeys(steps, 0.0)
    layers = []
    for item in series:
        values = dict(finite(item.points))
        above = {step: below[step] + max(0.0, values.get(step, 0.0)) for step in steps}
        layers.append((item, below, above))
        below = above
    count = min(limit, len(steps))
    shown = [steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)]
    x, y = step_axis(steps), value_axis(list(below.values()), zero=True)
    content = []
    for item, low, high in layers:
        outline = [(step, high[step]) for step in shown] + [(step, low[step]) for step in reversed(shown)]
        content.append(tag("polygon", points=coordinates(outline, x, y), fill=item.color, class_="layer"))
    return frame(x, y, content, label)


def legend(series: Sequence[Series]) -> Markup:
    """Names with their colours."""
    chips = [
        tag("span", tag("i", style=f"background:{item.color}"), item.name, class_="chip")
        for item in series
        if not item.hidden_legend
    ]
    return tag("div", chips, class_="legend")
