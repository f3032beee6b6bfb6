"""Whether gold follows the reward: exact facts, noise that is no parting, and hacks in the same noise."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from lightrft_visual.observe.guard import divergence
from lightrft_visual.observe.guard.divergence import (
    SIDE,
    Divergence,
    DivergenceTest,
    PairedScores,
    as_normal,
    coverage,
    distances,
    diversity,
    image_statistics,
    paired_scores_of,
    thumbnails,
)

PROMPTS = 40


def looks(reward, gold, seed=0, paired=True, steps=10, noise=0.1, prompts=PROMPTS):
    """Prompts differ widely; reward and gold are functions of the step on top of that."""
    rng = random.Random(seed)
    worth = [rng.gauss(0.5, 0.3) for _ in range(prompts)]
    for step in range(steps):
        if not paired:
            worth = [rng.gauss(0.5, 0.3) for _ in range(prompts)]
        rewards = [each + reward(step) + rng.gauss(0, noise) for each in worth]
        golds = [each + gold(step) + rng.gauss(0, noise) for each in worth]
        yield PairedScores(step, list(range(prompts)), rewards, golds)


def first(found):
    """(index, what parted) of the first alarm; None without any."""
    return next(((index, each) for index, each in enumerate(found) if each is not None), None)


def seen(sequence, paired=True, base=1):
    gains = DivergenceTest(paired, base)
    return first([gains.see(look) for look in sequence])


def nothing(step):
    return 0.0


def test_means_by_prompt_in_the_order_of_prompts():
    look = paired_scores_of(3, [(7, 1.0, 0.0), (2, 0.5, 1.0), (7, 0.0, 1.0)])
    assert look == PairedScores(3, [2, 7], [0.5, 0.5], [1.0, 0.5])


def on_ranks(monkeypatch, call, parts):
    """What `call` returns on each rank of as many as there are parts, given its own."""
    sent: list = []
    monkeypatch.setattr(divergence, "all_gather_object", lambda own: sent.append(own) or [own])
    for part in parts:
        call(*part)
    monkeypatch.setattr(divergence, "all_gather_object", lambda _: sent)
    return [call(*part) for part in parts]


def test_each_rank_has_the_scores_and_images_of_all_also_with_none_of_its_own(monkeypatch):
    scores = [(7, 1.0, 0.0), (2, 0.5, 1.0), (7, 0.0, 1.0)]
    media, groups = torch.rand(5, 3, 16, 16), torch.tensor([0, 0, 1, 1, 1])
    whole, statistics = paired_scores_of(3, scores), image_statistics(media, groups)
    assert image_statistics(media[:0], groups[:0]) == {}
    assert on_ranks(monkeypatch, paired_scores_of, [(3, scores[:1]), (3, []), (3, scores[1:])]) == [whole] * 3
    cut = slice(0, 1), slice(1, 1), slice(1, 5)
    found = on_ranks(monkeypatch, image_statistics, [(media[part], groups[part]) for part in cut])
    assert found == [statistics] * 3 and "image_diversity" in statistics


def test_steps_that_nobody_could_score_are_no_base():
    """A judge that is not there yet, and gold that stays behind the reward from where it came."""
    away = [PairedScores(step, [], [], []) for step in range(-6, 0)]
    reward, gold = (lambda step, rate=rate: rate * max(0, step - 8) for rate in (0.1, 0.01))
    left_behind = looks(reward, gold, paired=False, steps=16, prompts=2000)
    assert seen([*away, *left_behind], paired=False, base=5) is not None


def test_gold_that_falls_on_the_same_prompts_parts_where_it_began_to_fall():
    """A tenth, a third of the standard deviation over prompts: the differences of a prompt with itself show it."""
    index, parted = seen(looks(lambda step: 0.02 * step, lambda step: -0.1 * (step > 4)))
    assert index == 5 and parted.since == 4
    assert parted.gold[1] < parted.gold[0] and parted.reward[1] > parted.reward[0]


def test_on_new_prompts_a_loss_shows_against_the_first_steps():
    sequence = looks(lambda step: 0.05 * step, lambda step: -0.08 * max(0, step - 4), paired=False)
    index, parted = seen(sequence, paired=False, base=5)
    assert 5 <= index <= 7 and parted.gold[1] < parted.gold[0]


def test_a_reward_that_gains_without_gold_parts_from_the_base():
    index, parted = seen(looks(lambda step: 0.1 * step, nothing))
    assert index <= 5 and parted.start == 0 and parted.reward[1] - parted.reward[0] > 0.05


@pytest.mark.parametrize(
    ("reward", "gold"),
    [
        (lambda step: 0.05 * step, lambda step: 0.05 * step),
        (lambda step: 0.05 * step, lambda step: 0.02 * step),  # gold gains less, but gains
        (lambda step: -0.05 * step, lambda step: -0.05 * step),  # both fall: no hack
        (nothing, nothing),
        (lambda step: 0.5 * (step > 2) + 0.004 * step, lambda step: 0.5 * (step > 2)),  # near the ceiling
    ],
)
@pytest.mark.parametrize("paired", (True, False))
def test_gains_and_losses_that_are_no_parting(reward, gold, paired):
    for seed in range(3):
        assert seen(looks(reward, gold, seed, paired), paired, base=1 if paired else 5) is None


def test_other_prompts_are_a_new_start():
    gains = DivergenceTest(paired=True)
    for look in looks(nothing, nothing, steps=4):
        gains.see(look)
    for look in looks(nothing, lambda step: -0.5, steps=3):
        assert gains.see(replace(look, prompts=[each + PROMPTS for each in look.prompts])) is None
    assert len(gains.last) == 3


def scored_in_part(sequence, missing, seed=7):
    """Of each look `missing` prompts, others each time, could not be scored."""
    rng = random.Random(seed)
    for look in sequence:
        yield look.only(sorted(rng.sample(look.prompts, len(look.prompts) - missing)))


def test_prompts_that_a_scorer_missed_are_left_out_and_the_others_compared():
    hacked = list(looks(lambda step: 0.02 * step, lambda step: -0.1 * (step > 4)))
    assert seen(hacked)[0] <= seen(scored_in_part(hacked, 2))[0] <= 7
    assert seen(scored_in_part(looks(nothing, nothing, steps=30), 2)) is None
    # An evaluation that failed as a whole, or nearly, says nothing and is no new start.
    broken = [look.only([0]) if look.step in (3, 6) else look for look in hacked]
    empty = [look.only([]) if look.step in (0, 3) else look for look in hacked]
    assert seen(broken) is not None and seen(empty) is not None


def test_a_resumed_run_sees_the_same():
    sequence = list(looks(lambda step: 0.02 * step, lambda step: -0.1 * (step > 4)))
    whole, first_part, second = DivergenceTest(True), DivergenceTest(True), DivergenceTest(True)
    expected = [whole.see(look) for look in sequence]
    found = [first_part.see(look) for look in sequence[:4]]
    second.load_state_dict(json.loads(json.dumps(first_part.state_dict())))
    assert found + [second.see(look) for look in sequence[4:]] == expected
    assert isinstance(expected[-1], Divergence)


def test_state_between_two_looks_shares_their_lists_and_stays_as_it_was():
    test, (one, two, three) = DivergenceTest(True), looks(nothing, nothing, steps=3)
    test.see(one), test.see(two)
    state = test.state_dict()
    test.see(three)
    names = ("step", "prompts", "reward", "gold")
    named = [{name: getattr(each, name) for name in names} for each in (one, two)]
    assert state == {"first": named[:1], "last": named}
    assert state["last"][1]["gold"] is two.gold and state["last"][1]["prompts"] is two.prompts


def test_gold_has_risen_for_certain():
    rising, level = DivergenceTest(True), DivergenceTest(True)
    for look in looks(nothing, lambda step: 0.05 * step, steps=6):
        rising.see(look)
    for look in looks(nothing, nothing, steps=6):
        level.see(look)
    assert rising.risen() and not level.risen() and not DivergenceTest(True).risen()


def test_prompts_that_are_all_alike_are_measured_by_their_change():
    gains = DivergenceTest(True)
    found = [gains.see(PairedScores(step, [0, 1, 2], [step / 4] * 3, [1 - step / 4] * 3)) for step in range(3)]
    assert found[0] is None and found[1] == Divergence(0, 0, (0.0, 0.25), (1.0, 0.75))
    never, same = DivergenceTest(True), ([0, 1, 2], [0.5] * 3, [0.0] * 3)
    assert [never.see(PairedScores(step, *same)) for step in range(5)] == [None] * 5  # no change says nothing


@pytest.mark.parametrize(("t", "degrees", "expected"), [(4.032, 5, 2.576), (3.169, 10, 2.576), (5.408, 30, 4.417)])
def test_students_t_as_a_normal_deviate(t, degrees, expected):
    """5.408 of 30 degrees: as unlikely (7e-6, two-sided 1e-5) as 4.417."""
    assert as_normal(t, degrees) == pytest.approx(expected, abs=0.1) and as_normal(-t, degrees) < 0


def flat(*levels: int) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)


def drawings(groups: torch.Tensor) -> torch.Tensor:
    """A square of the group's colour at a place of its own, on a light ground."""
    drawn = flat(*[240] * len(groups)).clone()
    for number, group in enumerate(groups.tolist()):
        top = number % (SIDE // 2)
        drawn[number, group, top : top + SIDE // 2, : SIDE // 2] = 0
        drawn[number, 2, top : top + SIDE // 2, : SIDE // 2] = 0
    return drawn


def test_the_thumbnail_of_a_grey_image_of_one_channel_is_that_of_three_equal_ones():
    grey = torch.rand(2, 1, 40, 40)
    assert torch.equal(thumbnails(grey), thumbnails(grey.repeat(1, 3, 1, 1)))


def test_thumbnails_of_images_and_of_the_middle_frame_of_videos():
    image = torch.rand(2, 3, 64, 48)
    assert thumbnails(image).shape == (2, 3, SIDE, SIDE) and thumbnails(image).dtype == torch.uint8
    video = torch.zeros(1, 3, 5, 32, 32)
    video[:, :, 2] = 1.0
    assert thumbnails(video).float().mean() == 255


def test_diversity_is_the_mean_over_the_pairs_of_a_group(monkeypatch):
    shares = torch.tensor([[0.0, 0.2], [1.0, 0.8]])  # of full brightness
    assert torch.allclose(distances(flat(0, 255), flat(0, 51)), shares, atol=1e-4)
    thumbs, groups = flat(0, 255, 0, 51), torch.tensor([0, 0, 1, 1])
    assert math.isclose(diversity(thumbs, groups), 0.6, rel_tol=1e-5)  # pairs of 1 and 0.2
    assert math.isclose(diversity(thumbs, groups, torch.tensor([0, 1, 2, 2])), 0.2, rel_tol=1e-5)
    monkeypatch.setattr(divergence, "distances", None)  # which takes seconds of thousands of prompts
    assert math.isnan(diversity(thumbs, torch.arange(4)))


def test_coverage_of_the_references_themselves_of_one_of_them_and_of_others():
    groups = torch.arange(32) % 2
    references = drawings(groups)
    assert coverage(references, groups, references, groups) == 1.0
    single = references[:2].repeat(16, 1, 1, 1)
    assert 2 / 32 <= coverage(single, groups, references, groups) < 0.6
    assert coverage(references.roll(1, 0), groups, references, groups) == 0.0  # each drawn for the other caption
    assert coverage(flat(*[200] * 32), groups, references, groups) == 0.0


def test_coverage_leaves_out_the_references_of_groups_too_small_for_a_neighbourhood():
    groups = torch.tensor([0] * 8 + [1, 1])
    references = torch.cat([drawings(groups[:8]), flat(0, 0)])
    drawn = torch.cat([references[:8], flat(255, 255)])
    assert coverage(drawn, groups, references, groups) == 1.0
    assert coverage(drawn.flip(0), groups.flip(0), references, groups) == 1.0
    assert coverage(flat(*[255] * 10), groups, references, groups) == 0.0  # white covers neither drawings nor black
    for size in (1, 2):
        assert math.isnan(coverage(flat(*[255] * size), groups[:size], references[:size], groups[:size]))


@pytest.mark.parametrize("paired", [True, False])
def test_looks_of_one_prompt_raise_no_alarm_without_a_trend_and_warn_of_nothing(paired, recwarn):
    torch.set_warn_always(True)
    try:
        test = DivergenceTest(paired)
        level = looks(lambda step: 0, lambda step: 0, paired=paired, steps=12, prompts=1)
        assert [test.see(look) for look in level] == [None] * 12
    finally:
        torch.set_warn_always(False)
    assert not [str(each.message) for each in recwarn]
