"""Plans of micro-batches: complete, equal in number on all ranks, within the budget, and nearly full."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.replay.plan import (
    MicroBatch,
    SampleRef,
    moves_between_ranks,
    own_micro_batches,
    plan_by_count,
    plan_by_tokens,
    shuffled_steps,
    unused_share,
    waiting_share,
)

BUDGET = 20
steps_of_ranks = st.lists(st.lists(st.integers(1, BUDGET), max_size=12), min_size=1, max_size=4).filter(any)


def references(tokens: list[list[int]]) -> list[SampleRef]:
    return [SampleRef(rank, index, count) for rank, own in enumerate(tokens) for index, count in enumerate(own)]


def assert_complete(plans, tokens) -> None:
    assert len({len(plan) for plan in plans}) == 1
    for rank, (plan, own) in enumerate(zip(plans, tokens)):
        planned = sorted(sample.index for batch in plan for sample in batch)
        assert planned == list(range(len(own)))
        assert all(sample.rank == rank for batch in plan for sample in batch)


@settings(deadline=None)
@given(steps_of_ranks)
def test_token_plans_hold_every_sample_once_within_the_budget(tokens):
    plans = plan_by_tokens(references(tokens), len(tokens), BUDGET)
    assert_complete(plans, tokens)
    assert all(sum(sample.tokens for sample in batch) <= BUDGET for plan in plans for batch in plan)
    assert sum(not batch for plan in plans for batch in plan) == sum(max(0, len(plans[0]) - len(own)) for own in tokens)


@settings(deadline=None)
@given(steps_of_ranks, st.integers(1, 5))
def test_count_plans_hold_every_sample_once(tokens, size):
    plans = plan_by_count(references(tokens), len(tokens), size)
    assert_complete(plans, tokens)
    assert len(plans[0]) == max(-(-len(own) // size) for own in tokens)
    for plan in plans:
        assert max(map(len, plan)) - min(map(len, plan)) <= 1
        assert max(map(len, plan)) <= size


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_at_most_two_percent_of_the_budget_is_left_empty(ranks, seed):
    draw = random.Random(seed)
    tokens = [[min(4096, 350 + int(draw.lognormvariate(6, 0.8))) for _ in range(2048)] for _ in range(ranks)]
    plans = plan_by_tokens(balanced(references(tokens), ranks), ranks, 16384)
    assert unused_share(plans, 16384) < 0.02
    assert waiting_share(plans) < 0.02


def balanced(step: list[SampleRef], ranks: int, by_tokens: bool = True) -> list[SampleRef]:
    targets = dict(moves_between_ranks(step, ranks, by_tokens))
    return [replace(sample, rank=targets.get(sample, sample.rank)) for sample in step]


@settings(deadline=None)
@given(steps_of_ranks, st.booleans())
def test_moves_never_widen_the_gap(tokens, by_tokens):
    step = references(tokens)
    shares = []
    for each in (step, balanced(step, len(tokens), by_tokens)):
        loads = [0] * len(tokens)
        for sample in each:
            loads[sample.rank] += sample.tokens if by_tokens else 1
        shares.append(max(loads) - min(loads))
    assert shares[1] <= shares[0]
    assert by_tokens or shares[1] <= 1


def test_few_samples_move():
    draw = random.Random(0)
    step = references([[draw.randint(100, 1000) for _ in range(200)] for _ in range(8)])
    assert len(moves_between_ranks(step, 8, by_tokens=True)) < 100


def test_full_bins_are_found():
    plans = plan_by_tokens(references([[5, 5, 10, 1, 19, 20]]), 1, BUDGET)
    assert unused_share(plans, BUDGET) == 0
    assert [sorted(sample.tokens for sample in batch) for batch in plans[0]].count([20]) == 1


def test_a_sample_longer_than_the_budget_is_named():
    with pytest.raises(DataError, match="sample 1 of rank 0 has 21 tokens"):
        plan_by_tokens(references([[3, 21]]), 1, BUDGET)


def test_the_steps_do_not_depend_on_the_number_of_ranks():
    one = [SampleRef(0, key, 1, key) for key in range(12)]
    three = [SampleRef(key % 3, key // 3, 1, key) for key in (5, 3, 1, 0, 2, 4, 6, 11, 10, 9, 8, 7)]
    keys = [[[sample.key for sample in step] for step in shuffled_steps(refs, 5, seed=7)] for refs in (one, three)]
    assert keys[0] == keys[1]
    assert [len(step) for step in keys[0]] == [5, 5, 2]


def test_another_seed_is_another_order():
    samples = references([[1] * 50])
    orders = [[sample.index for sample in shuffled_steps(samples, None, seed)[0]] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(50))


def test_a_step_needs_samples():
    with pytest.raises(ConfigError, match="at least 1"):
        shuffled_steps(references([[1]]), 0, seed=1)


def test_empty_micro_batches_get_a_filler():
    plans = plan_by_count(references([[1, 1, 1], [1]]), 2, 1)
    fillers = own_micro_batches(plans[1])
    assert sorted(batch.filler for batch in fillers) == [False, True, True]
    assert all(batch == MicroBatch([0], filler=batch.filler) for batch in fillers)
