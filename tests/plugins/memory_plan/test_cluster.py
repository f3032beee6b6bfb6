"""The simulation of trainers and engines, against what can be worked out by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from lightrft_visual.errors import ConfigError
from lightrft_visual.plugins.memory_plan.cluster import (
    Costs,
    Layout,
    best,
    decode_seconds,
    drawn_from,
    layouts,
    long_tailed,
    measured,
    simulate,
)


def equal(prompts: int, samples: int, length: int):
    return lambda number: np.full((prompts, samples), length)


def test_an_engine_decodes_until_its_longest_response_ends():
    costs = Costs(token=0.5, row=0.1)
    assert decode_seconds([4, 10, 2], costs) == pytest.approx(2 * 0.8 + 2 * 0.7 + 6 * 0.6)
    # Two at a time: 4 and 10 begin; at 4 the third takes the place of the first and ends at 6, alone goes 10 on.
    assert decode_seconds([4, 10, 2], Costs(0.5, 0.1, slots=2)) == pytest.approx(6 * 0.7 + 4 * 0.6)
    assert decode_seconds([5] * 7, Costs(1.0, slots=2)) == pytest.approx(4 * 5)
    draw = np.random.default_rng(0).integers(1, 50, 40)
    assert decode_seconds(draw, Costs(1.0, 0.2, slots=40)) == pytest.approx(decode_seconds(draw, Costs(1.0, 0.2)))


def test_without_staleness_generation_and_training_add_up():
    costs = Costs(token=0.1, prompt=0.5, load=0.25, learn=0.001, step=1.0)
    batch = equal(8, 4, 10)  # two pieces of two prompts for each of two engines: 2 * (2 * .5 + 1) and the weights once
    split = simulate(costs, Layout(1, 2), batch)
    learn = 1.0 + 0.001 * 320
    assert split.step_seconds == pytest.approx(4.0 + 0.25 + learn)
    assert split.idle_trainers == pytest.approx(1 - learn / split.step_seconds)
    assert split.idle_engines == pytest.approx(1 - 4.25 / split.step_seconds)
    assert split.staleness == split.staleness_max == 0
    handed = simulate(replace(costs, piece=0.5), Layout(1, 2), batch)
    assert handed.step_seconds == pytest.approx(split.step_seconds + 2 * 0.5)
    colocated = simulate(costs, Layout(2), batch)
    assert colocated.step_seconds == pytest.approx(4 * 0.5 + 1.0 + 0.25 + 1.0 + 0.001 * 320 / 2)
    assert colocated.idle_trainers == 0


@pytest.mark.parametrize("learn,generate", [(3.0, 2.0), (2.0, 2.0), (1.0, 2.0)])
def test_one_batch_ahead_the_longer_side_sets_the_pace(learn, generate):
    costs = Costs(token=generate / 20, step=learn)  # two pieces of one prompt, one after the other
    found = simulate(costs, Layout(1, 1, staleness=1), equal(2, 4, 20))
    assert found.step_seconds == pytest.approx(max(learn, generate))
    assert found.idle_trainers == pytest.approx(1 - learn / max(learn, generate))
    assert found.idle_engines == pytest.approx(1 - generate / max(learn, generate))
    assert found.staleness_max <= 1 and (found.staleness > 0)


def test_a_long_tail_holds_a_step_up_by_its_longest_response():
    lengths = long_tailed(100, 1.0, 4000, 16, 4)
    found = simulate(Costs(token=0.01, step=0.5), Layout(1, 16, shares=1), lengths, steps=10)
    wanted = np.mean([lengths(number).max() for number in range(1, 10)]) * 0.01 + 0.5
    assert found.step_seconds == pytest.approx(wanted)
    assert found.idle_engines > 0.5  # most of them wait for one


def test_partial_rollouts_lose_no_time_to_the_tail():
    """A step takes at least the work of all responses over all slots; two batches ahead fill the gaps of the tail."""
    lengths = long_tailed(100, 1.0, 2000, 32, 1)
    costs, steps = Costs(token=0.01, slots=4, step=0.5), 40
    synchronous = simulate(costs, Layout(1, 2), lengths, steps)
    found = simulate(costs, Layout(1, 2, staleness=2, partial=True, partial_tokens=16), lengths, steps)
    work = np.mean([lengths(number).sum() for number in range(steps)]) * 0.01 / (2 * 4)
    assert work <= found.step_seconds * 1.03 and found.step_seconds < 1.25 * work
    assert synchronous.step_seconds > 1.8 * found.step_seconds
    assert found.staleness_max <= 2 and 0 < found.staleness < 2
    assert found.idle_engines < 0.2


def test_equal_responses_stream_as_they_would_in_pieces():
    costs = Costs(token=0.1, row=0.01, slots=8, step=1.0)
    whole = simulate(costs, Layout(1, 2, shares=1), equal(4, 4, 10))
    streamed = simulate(costs, Layout(1, 2, partial=True), equal(4, 4, 10))
    assert streamed.step_seconds == pytest.approx(whole.step_seconds)
    assert streamed.staleness == pytest.approx(0, abs=1e-9)
    loading = simulate(Costs(0.1, 0.01, slots=8, load=0.5, step=1.0), Layout(1, 2, partial=True), equal(4, 4, 10))
    assert loading.step_seconds == pytest.approx(streamed.step_seconds + 0.5)


def test_no_token_is_older_than_allowed():
    for staleness in (0, 1, 3):
        for partial in (False, True):
            lengths = long_tailed(50, 1.2, 1000, 12, 2)
            found = simulate(Costs(0.01, 0.001, 0.02, 8, 0.1, step=1.0), Layout(1, 3, staleness, partial), lengths)
            assert found.staleness_max <= staleness


def test_a_thousand_gpus_are_simulated_in_seconds():
    began = time.process_time()
    costs = Costs(token=0.02, row=1e-5, prompt=0.01, load=2.0, learn=2e-2, step=5.0)
    found = best(costs, layouts(1024, (0, 1)), long_tailed(1500, 0.7, 8192, 1024, 16), steps=4)
    assert len(found) == 15 and found[0].step_seconds <= min(each.step_seconds for each in found) * 1.03
    assert time.process_time() - began < 20


def test_the_best_division_follows_the_costs():
    batch = drawn_from([100] * 10, 64, 8)
    learning = best(Costs(token=0.001, learn=1e-3, step=0.1), layouts(8), batch)[0].layout
    sampling = best(Costs(token=0.1, learn=1e-5, slots=64), layouts(8), batch)[0].layout
    assert learning.trainers > sampling.trainers or not learning.engines
    assert sampling.engines == 0 or sampling.engines > 4


def test_costs_of_a_run_give_its_times_back():
    lengths = long_tailed(60, 0.9, 500, 16, 4)
    times = {"generate": 8.0, "reward": 0.5, "forward": 2.0, "train": 3.0, "sync": 0.25}
    costs = measured(times, 4, lengths)
    found = simulate(costs, Layout(4), lengths, steps=4)
    assert found.step_seconds == pytest.approx(sum(times.values()))


def test_layouts_that_cannot_be_are_refused():
    for wrong in ({"trainers": 0}, {"trainers": 1, "staleness": 1}, {"trainers": 1, "engines": -1}):
        with pytest.raises(ConfigError):
            Layout(**wrong)
