"""Ranges, thinning and content of the report's charts."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft_visual.observe.report.curves import Series, area_chart, line_chart, number, running_mean, thin, value_axis

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def test_wide_positive_values_are_logarithmic():
    low, high, log = value_axis([1e-7, 1e-5, 1e-3])
    assert log and 0 < low < 1e-7 and high > 1e-3
    assert not value_axis([0.0, 1e-5, 1e-1])[2]


def test_one_spike_does_not_flatten_the_rest():
    assert value_axis([1.0, 2.0] * 100 + [1000.0])[1] < 10


@given(values=VALUES)
def test_an_axis_has_a_width_and_holds_its_values(values):
    low, high, log = value_axis(values)
    assert low < high and (low > 0 or not log)
    spikes = [value for value in values if not low <= value <= high]
    assert len(spikes) <= 0.05 * len(values) + 2


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
    assert running_mean(points) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]


@given(values=VALUES)
def test_a_smoothed_line_holds_its_raw_points_as_well(values):
    chart = json.loads(
        json.dumps(line_chart([Series("a", list(enumerate(values)), "#000", smooth=True)]), allow_nan=False)
    )
    (line,) = chart["lines"]
    drawn = line.get("raw", line)
    assert ("raw" in line) == (len(values) > 8) and drawn["x"] == list(range(len(values)))
    assert drawn["y"] == pytest.approx(values, rel=1e-4)
    assert chart["x"][0] < chart["x"][1] and chart["y"][0] < chart["y"][1]


def test_long_lines_of_a_chart_are_drawn_at_the_same_steps():
    flat, spiked = ([(step, float(step == spike)) for step in range(1000)] for spike in (-1, 333))
    chart = line_chart([Series("a", flat, "#1", smooth=True), Series("b", spiked, "#2"), Series("c", [(7, 0)], "#3")])
    smooth, plain, dot = chart["lines"]
    assert smooth["x"] == smooth["raw"]["x"] == plain["x"] and dot["x"] == [7]
    assert len(plain["x"]) <= 302 and {0, 7, 333, 999} <= set(plain["x"])


def test_no_finite_point_no_chart():
    assert line_chart([Series("a", [(1, math.nan)], "#000")]) is None
    assert area_chart([]) is None
    single = line_chart([Series("a", [(1, 5.0)], "#000")])
    assert single["lines"][0]["dots"] and single["x"] == [0.5, 1.5]
    mixed = line_chart([Series("a", [(1, math.inf), (2, 1.0), (3, 2.0)], "#000"), Series("b", [(1, math.nan)], "#000")])
    assert [(line["name"], line["x"]) for line in mixed["lines"]] == [("a", [2, 3])]


def test_areas_share_their_steps_and_fit_their_sum():
    series = [Series("a", [(0, 1.0), (1, 1.0)], "#111"), Series("b", [(0, 2.0), (2, 4.0)], "#222")]
    chart = area_chart(series)
    assert [line["x"] for line in chart["lines"]] == [[0, 1, 2]] * 2
    assert [line["y"] for line in chart["lines"]] == [[1.0, 1.0, 0.0], [2.0, 0.0, 4.0]]
    assert chart["stacked"] and chart["y"][0] == 0 and chart["y"][1] >= 4.0
    assert len(area_chart([Series("a", [(step, 1.0) for step in range(1000)], "#1")])["lines"][0]["x"]) == 150


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
