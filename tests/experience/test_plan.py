"""Plans of micro-batches: complete, equal in number on all ranks, within the budget, and nearly full."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.batch_plan import (
    MicroBatch,
    SampleRef,
    computed_tokens,
    micro_batches,
    most_tokens,
    moves_between_ranks,
    own_micro_batches,
    plan_by_tokens,
    shuffled_steps,
)

BUDGET = 20
steps_of_ranks = st.lists(st.lists(st.integers(1, BUDGET), max_size=12), min_size=1, max_size=4).filter(any)
groups_of_ranks = st.lists(
    st.lists(st.tuples(st.integers(1, 8), st.lists(st.integers(1, 12), min_size=1, max_size=6)), max_size=5),
    min_size=1,
    max_size=4,
).filter(any)


def references(tokens: list[list[int]]) -> list[SampleRef]:
    return [SampleRef(rank, index, count) for rank, own in enumerate(tokens) for index, count in enumerate(own)]


def grouped(ranks) -> list[SampleRef]:
    """ranks: for each its groups, as (prompt tokens, completion tokens of its samples)."""
    made, group = [], 0
    for rank, own in enumerate(ranks):
        index = 0
        for prompt, completions in own:
            for count in completions:
                made.append(SampleRef(rank, index, prompt + count, len(made), group, prompt))
                index += 1
            group += 1
    return made


def computed(batch: list[SampleRef]) -> int:
    """Tokens of a batch, in which a prompt counts once."""
    prompts = {sample.group: sample.prompt for sample in batch}
    return sum(sample.tokens - sample.prompt for sample in batch) + sum(prompts.values())


# Samples that share nothing and samples of groups, with the number of ranks, some of which may have none.
steps = steps_of_ranks.map(lambda ranks: (references(ranks), len(ranks)))
steps |= groups_of_ranks.map(lambda ranks: (grouped(ranks), len(ranks)))


def balanced(step: list[SampleRef], ranks: int, by_tokens: bool = True) -> list[SampleRef]:
    targets = dict(moves_between_ranks(step, ranks, by_tokens))
    return [replace(sample, rank=targets.get(sample, sample.rank)) for sample in step]


def by_rank(step: list[SampleRef], ranks: int) -> list[list[SampleRef]]:
    return [[sample for sample in step if sample.rank == rank] for rank in range(ranks)]


def assert_complete(plans, tokens) -> None:
    assert len({len(plan) for plan in plans}) == 1
    for rank, (plan, own) in enumerate(zip(plans, tokens)):
        planned = sorted(sample.index for batch in plan for sample in batch)
        assert planned == list(range(len(own)))
        assert all(sample.rank == rank for batch in plan for sample in batch)


@settings(deadline=None)
@given(steps)
def test_token_plans_hold_every_sample_once_within_the_budget_where_a_prompt_counts_once(step_and_ranks):
    step, ranks = step_and_ranks
    plans, own = plan_by_tokens(step, ranks, BUDGET), by_rank(step, ranks)
    assert_complete(plans, own)
    assert all(computed(batch) <= BUDGET for plan in plans for batch in plan)
    empty = sum(not batch for plan in plans for batch in plan)
    assert step[0].group is not None or empty == sum(max(0, len(plans[0]) - len(each)) for each in own)


@settings(deadline=None)
@given(steps_of_ranks, st.integers(1, 5))
def test_count_plans_hold_every_sample_once(tokens, size):
    plans = micro_batches(references(tokens), len(tokens), size)
    assert_complete(plans, tokens)
    assert len(plans[0]) == max(-(-len(own) // size) for own in tokens)
    for plan in plans:
        assert max(map(len, plan)) - min(map(len, plan)) <= 1
        assert max(map(len, plan)) <= size


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_at_most_two_percent_of_the_budget_is_left_empty_and_two_percent_of_the_time_spent_waiting(ranks):
    draw, budget = random.Random(0), 16384
    tokens = [[min(4096, 350 + int(draw.lognormvariate(6, 0.8))) for _ in range(2048)] for _ in range(ranks)]
    plans = plan_by_tokens(balanced(references(tokens), ranks), ranks, budget)
    loads = [[computed_tokens(batch) for batch in plan] for plan in plans]
    whole = sum(map(sum, loads))
    assert whole / (budget * sum(map(len, loads))) > 0.98
    assert whole / (ranks * sum(max(each) for each in zip(*loads))) > 0.98  # of the fullest micro-batch of each round


@settings(deadline=None)
@given(steps, st.booleans())
def test_moves_never_widen_the_gap(step_and_ranks, by_tokens):
    step, ranks = step_and_ranks
    by_tokens = by_tokens or step[0].group is not None
    gaps = []
    for each in (step, balanced(step, ranks, by_tokens)):
        loads = [computed(own) if by_tokens else len(own) for own in by_rank(each, ranks)]
        gaps.append(max(loads) - min(loads))
    assert gaps[1] <= gaps[0] and (by_tokens or gaps[1] <= 1)


@pytest.mark.parametrize(
    ("tokens", "moved"),
    [
        ([[10, 6, 4], [10]], [4]),  # of a gap of 10, not the 10
        ([[20, 4, 30, 6, 2], [22]], [20]),  # whatever the order: 20 of a gap of 40
    ],
)
def test_the_sample_that_comes_nearest_to_halving_the_gap_moves(tokens, moved):
    assert [sample.tokens for sample, _ in moves_between_ranks(references(tokens), 2, by_tokens=True)] == moved


def test_a_sample_that_shares_nothing_is_in_no_group_whatever_its_number():
    alone, pair = SampleRef(0, 1, 15, 1), [SampleRef(0, index, 5, index, group=1, prompt=3) for index in (0, 2)]
    assert moves_between_ranks([pair[0], alone, pair[1]], 2, by_tokens=True) == [(each, 1) for each in pair]


def test_few_samples_move():
    draw = random.Random(0)
    step = references([[draw.randint(100, 1000) for _ in range(200)] for _ in range(8)])
    assert len(moves_between_ranks(step, 8, by_tokens=True)) < 100


def test_samples_of_a_prompt_change_ranks_together_where_that_evens_the_ranks():
    draw, step = random.Random(0), []
    for key in range(512):  # 8 of a prompt, on 4 ranks of which one has half of the samples
        rank = max(0, key // 8 % 6 - 2)
        step.append(SampleRef(rank, key, 2000 + draw.randint(0, 1500), key, together=key // 8))
    moves = moves_between_ranks(step, 4, by_tokens=True)
    sent = {(sample.together, rank) for sample, rank in moves}
    loads = [computed_tokens(own) for own in by_rank(balanced(step, 4), 4)]
    assert len(moves) > 6 * len(sent) and max(loads) < 1.01 * sum(loads) / 4


def test_empty_micro_batches_get_a_filler_and_a_sample_longer_than_the_budget_is_named():
    samples = references([[1, 1, 1], [1]])
    fillers = own_micro_batches(micro_batches(samples, 2, 1), 1, samples)
    assert sorted(batch.filler for batch in fillers) == [False, True, True]
    assert all(batch == MicroBatch([0], filler=batch.filler, media=frozenset()) for batch in fillers)
    with pytest.raises(DataError, match="sample 1 of rank 0 has 21 tokens"):
        plan_by_tokens(references([[3, 21]]), 1, BUDGET)


def test_micro_batches_name_the_media_of_all_ranks_those_of_a_filler_included():
    image, video = frozenset({"pixel_values"}), frozenset({"pixel_values_videos"})
    left = [SampleRef(0, 0, 1, media=image), SampleRef(0, 1, 1)]
    right = [SampleRef(1, 0, 1, media=video)]
    plan = [[[left[1]], [left[0]], [left[1]]], [right, right, []]]
    for rank, indices in ((0, [[1], [0], [1]]), (1, [[0], [0], [0]])):
        found = own_micro_batches(plan, rank, [*left, *right])
        assert [batch.indices for batch in found] == indices
        assert [batch.media for batch in found] == [video, image | video, video]


def test_the_steps_depend_on_the_seed_and_not_on_the_number_of_ranks():
    one = [SampleRef(0, key, 1, key) for key in range(12)]
    three = [SampleRef(key % 3, key // 3, 1, key) for key in (5, 3, 1, 0, 2, 4, 6, 11, 10, 9, 8, 7)]
    first, same, again, other = (
        [[sample.key for sample in step] for step in shuffled_steps(samples, 5, seed)]
        for samples, seed in ((one, 7), (three, 7), (one, 7), (one, 8))
    )
    assert first == same == again != other and [len(step) for step in first] == [5, 5, 2]
    assert sorted(sum(other, [])) == list(range(12))
    with pytest.raises(ConfigError, match="at least 1"):
        shuffled_steps(one, 0, seed=1)


# --- groups that share a prompt ------------------------------------------------------------------------------------


def test_groups_stay_together_and_large_ones_are_cut_evenly():
    step = grouped([[(8, [1] * 4), (8, [2] * 4), (8, [3] * 8)]])
    (plan,) = plan_by_tokens(step, 1, 20)
    found = sorted((batch[0].group, len(batch)) for batch in plan)
    assert found == [(0, 4), (1, 4), (2, 4), (2, 4)] or found == [(0, 4), (1, 4), (2, 2), (2, 3), (2, 3)]
    assert all(len({sample.group for sample in batch}) == 1 for batch in plan)


def test_a_micro_batch_takes_more_samples_where_they_share():
    """Up to the tokens of as many that share nothing."""
    step = grouped([[(90, [10] * 16)]])
    (plan,) = micro_batches(step, 1, 4)
    assert [len(batch) for batch in plan] == [16]
    alone = [replace(sample, group=None) for sample in step]
    assert [len(batch) for batch in micro_batches(alone, 1, 4)[0]] == [4] * 4


def test_steps_are_made_of_whole_groups():
    step = grouped([[(3, [1] * 4)] * 6])
    for seed in range(3):
        steps = shuffled_steps(step, 8, seed)
        assert [len({sample.group for sample in each}) for each in steps] == [2, 2, 2]
    orders = [[sample.group for each in shuffled_steps(step, 8, seed) for sample in each] for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 3


def test_a_group_is_parted_only_where_a_rank_would_wait_for_it():
    whole = balanced(grouped([[(10, [5] * 8)] * 4, []]), 2)
    homes = {(sample.group, sample.rank) for sample in whole}
    assert len(homes) == 4 and sum(rank for _, rank in homes) == 2
    parted = balanced(grouped([[(10, [5] * 8)], []]), 2)
    assert sorted(sample.rank for sample in parted) == [0] * 4 + [1] * 4
    single = balanced(grouped([[(10, [5])], []]), 2)
    assert [sample.rank for sample in single] == [0]


@settings(deadline=None)
@given(groups_of_ranks, st.integers(1, 6), st.sampled_from([None, 21, 40]), st.booleans())
def test_no_micro_batch_has_more_tokens_than_was_said(ranks, size, budget, shares):
    """What a memory plan takes as the largest one, of the longest samples, is never exceeded by shorter ones."""
    step = [replace(sample, rank=0, index=sample.key) for sample in grouped(ranks)]
    step = step if shares else [replace(sample, group=None) for sample in step]
    longest = [replace(sample, tokens=8 + 12, prompt=8) for sample in step]
    for samples in (step, longest):
        (plan,) = micro_batches(samples, 1, size, budget)
        assert max(map(computed_tokens, plan)) <= most_tokens(longest, size, budget)
