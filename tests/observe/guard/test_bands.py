"""The band and the parting: exact facts, and what holds for any run."""

import math
import random

import pytest

from lightrft_visual.observe.guard.watch import STEP_BANDS, Band, Bounds, Parting


def test_a_band_is_the_median_of_the_first_values_and_its_reach_to_both_sides():
    band = Band(Bounds(share=0.5), learn=3)
    assert [band.see(value) for value in (2.0, 3.0, 4.0)] == [0, 0, 0]
    reach = 6 * math.sqrt(1 / 2)  # neighbours differ by 1, as those of standard deviation sqrt(1/2) do
    assert band.limits() == pytest.approx((3 - reach, 3 + reach))
    assert [band.see(value) for value in (3 + reach + 1e-9, 9.0, 3.0, -9.0)] == [1, 2, 0, 1]
    assert band.limits() == pytest.approx((3 - reach, 3 + reach))  # later values teach nothing


def test_a_band_of_equal_values_reaches_by_share_or_floor_and_only_to_the_sides_that_count():
    def limits(bounds, value):
        band = Band(bounds, learn=2)
        band.see(value), band.see(value)
        return band.limits()

    assert limits(Bounds(share=0.25), 4.0) == (3.0, 5.0)
    assert limits(Bounds(share=0.25, floor=2.0), 4.0) == (2.0, 6.0)
    assert limits(Bounds(share=0.5, low=False), 4.0) == (-math.inf, 6.0)
    assert limits(Bounds(share=0.5, high=False), 4.0) == (2.0, math.inf)
    assert limits(STEP_BANDS["truncated_share"], 0.625) == (-math.inf, 0.875)  # no wider where it begins high


def test_a_run_that_is_hacked_within_a_few_steps_does_not_teach_the_band():
    """The lengths of a run whose reward counts words; one that runs away while the band is learnt still leaves it."""
    away = Band(Bounds(share=0.5, floor=1.0), learn=5)
    assert [away.see(value) for value in (4.0, 4.0, 4.0, 4.3, 4.7, 6.0, 7.5, 8.0)][-2:] == [1, 2]
    band = Band(Bounds(share=0.5, floor=1.0), learn=5)
    found = [band.see(value) for value in (2.9, 3.1, 3.8, 5.9, 6.5, 7.4, 7.7, 2.8, 3.0)]
    assert found == [0, 0, 0, 1, 2, 3, 4, 0, 0]
    assert band.values == [2.9, 3.1, 3.8, 2.8, 3.0]


@pytest.mark.parametrize("seed", range(6))
def test_what_varies_as_it_did_while_it_was_learnt_seldom_leaves_twice(seed):
    rng = random.Random(seed)
    band = Band(Bounds(share=0.3), learn=8)
    assert max(band.see(rng.gauss(1.0, 0.05)) for _ in range(300)) < 2


def apart(pairs, **settings):
    parting = Parting(**({"learn": 8, "width": 6.0} | settings))
    return [parting.see(step, reward, gold) for step, (reward, gold) in enumerate(pairs, start=1)], parting


def test_gold_that_falls_while_the_reward_rises_parts_from_where_it_was_best():
    pairs = [(step / 40, 0.4 + min(step, 30 - step) * 0.02) for step in range(1, 31)]
    found, parting = apart(pairs, smoothing=1.0)
    assert parting.best_step == 15 and parting.best_gold == pytest.approx(0.7)
    assert found[:15] == [0] * 15 and found[-1] > 5


def test_gold_and_reward_that_fall_together_are_no_parting():
    found, _ = apart([(1 - step / 40, 1 - step / 40) for step in range(30)], smoothing=1.0)
    assert max(found) == 0


@pytest.mark.parametrize("seed", range(8))
def test_noise_around_a_curve_that_rises_and_stays_is_no_parting(seed):
    """Gold is as noisy as that of 256 samples, and the reward is gold itself."""
    rng = random.Random(seed)
    means = [0.4 + 0.5 * min(1, step / 60) for step in range(120)]
    golds = [mean + rng.gauss(0, 0.035) for mean in means]
    assert max(apart([(gold, gold) for gold in golds])[0]) == 0
    assert max(apart([(reward, gold) for reward, gold in zip(means, golds)])[0]) < 2


@pytest.mark.parametrize("seed", range(4))
def test_a_hack_is_found_in_the_same_noise(seed):
    rng = random.Random(seed)
    pairs = [
        (step / 60, 0.4 + 0.5 * (min(step, 30) - 2 * max(0, step - 30)) / 30 + rng.gauss(0, 0.035))
        for step in range(60)
    ]
    assert max(apart(pairs)[0]) >= 2
