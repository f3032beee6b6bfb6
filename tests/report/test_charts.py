"""Scales, ticks and thinning of the report's charts."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightrft_visual.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    area_chart,
    line_chart,
    nice_ticks,
    number,
    running_mean,
    thin,
    value_axis,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def test_axis_ends_stand_at_the_frame():
    axis = value_axis([0.0, 1.0])
    assert axis.place(axis.low) == HEIGHT - BOTTOM and axis.place(axis.high) == TOP
    assert axis.ticks == [0.0, 0.25, 0.5, 0.75, 1.0] and not axis.log


def test_wide_positive_values_are_logarithmic():
    axis = value_axis([1e-7, 1e-5, 1e-3])
    assert axis.log and axis.ticks == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    assert axis.place(1e-5) == pytest.approx((axis.start + axis.end) / 2)
    assert not value_axis([0.0, 1e-5, 1e-1]).log


def test_one_spike_does_not_flatten_the_rest():
    axis = value_axis([1.0, 2.0] * 100 + [1000.0])
    assert axis.high < 10


@given(low=st.floats(-1e5, 1e5), width=st.floats(1e-3, 1e5))
def test_ticks_are_inside_and_even(low, width):
    assume(low + width > low)
    ticks = nice_ticks(low, low + width)
    assert 2 <= len(ticks) <= 11
    assert all(low - 1e-6 * width <= tick <= low + width + 1e-6 * width for tick in ticks)


@given(values=VALUES, limit=st.integers(4, 30))
def test_thinning_keeps_extremes_and_ends(values, limit):
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 1) + 1
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert min(v for _, v in kept) == min(values) and max(v for _, v in kept) == max(values)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_running_mean_by_hand():
    points = [(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)]
    assert running_mean(points, 3) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]


@given(values=VALUES)
def test_lines_stay_inside_the_picture(values):
    chart = line_chart([Series("a", list(enumerate(values)), "#000", smooth=True)], "a")
    for points in re.findall(r'points="([^"]*)"', chart):
        for pair in points.split():
            x, y = map(float, pair.split(","))
            assert LEFT - 1 <= x <= WIDTH - RIGHT + 1 and TOP - 5 <= y <= HEIGHT - BOTTOM + 5


def test_no_finite_point_no_chart():
    assert line_chart([Series("a", [(1, math.nan)], "#000")], "a") is None
    assert area_chart([], "a") is None
    assert line_chart([Series("a", [(1, 5.0)], "#000")], "a").count("<circle") == 1


def test_names_are_escaped():
    chart = line_chart([Series('"><script>', [(0, 1), (1, 2)], "#000")], "</svg><script>")
    assert "<script" not in chart


def test_area_stacks_to_the_sum():
    series = [Series("a", [(0, 1.0), (1, 1.0)], "#111"), Series("b", [(0, 2.0), (1, 2.0)], "#222")]
    chart = area_chart(series, "time")
    polygons = re.findall(r'<polygon points="([^"]*)"', chart)
    first, second = ([tuple(map(float, pair.split(","))) for pair in polygon.split()] for polygon in polygons)
    assert first[:2] == second[:-3:-1][::1] or set(first[:2]) == set(second[2:])


def test_numbers_are_short():
    shown = {
        0: "0",
        0.25: "0.25",
        1280: "1.28k",
        3e-6: "3e-6",
        3.2e-4: "3.2e-4",
        2e9: "2e9",
        2_500_000: "2.5M",
        -0.5: "-0.5",
    }
    assert {value: number(value) for value in shown} == shown
