"""Dynamic sampling over ranks: luck is shared, and the batch does not depend on how many ranks there are."""

import math
import random
import weakref
from collections import Counter

import pytest
import torch.distributed as dist
from forked import on_ranks

from lightrft_visual.experience.rollouts import PromptFeatures, Rollout
from lightrft_visual.trainer.features.dynamic_sampling import (
    GroupRef,
    balanced,
    by_group,
    collect,
    is_informative,
)


def collected(
    ranks: int, rank: int, differing: set[int], wanted: int, tries: int, captions: set[int] = frozenset()
) -> tuple[tuple[int, int], list[int]]:
    """((rounds, groups of equal rewards), the ids of all): each round brings wanted * ranks new prompts, every rank its
    share. captions: the prompts that ask for an image."""
    drawn = []

    def sample_round(number: int) -> list[Rollout]:
        held = sum(rollout() is not None for rollout in drawn)
        assert held <= 2 * wanted * ranks, f"{held} rollouts of earlier rounds are held"
        made = []
        for place in range(wanted):
            prompt = PromptFeatures("", [1], group_id=(number * wanted + place) * ranks + rank)
            prompt.caption = "drawn" if prompt.group_id in captions else None
            rewards = (0.0, 1.0) if prompt.group_id in differing else (0.5, 0.5)
            made += [Rollout(prompt, [2], None, "", False, sample_id=0, reward=reward) for reward in rewards]
        drawn.extend(map(weakref.ref, made))
        return made

    rollouts, *counts = collect(wanted, tries, sample_round)
    assert all(len(group) == 2 for group in by_group(rollouts).values())
    return tuple(counts), list(by_group(rollouts))


def shared(differing: list[int]) -> tuple[int, int, list[int]]:
    dist.init_process_group("gloo")
    counts, ids = collected(dist.get_world_size(), dist.get_rank(), set(differing), wanted=4, tries=4)
    return *counts, ids


def test_a_round_is_repeated_while_groups_that_differ_are_missing_and_equal_ones_fill_the_batch_after_the_last():
    counts, ids = collected(ranks=1, rank=0, differing={1, 2, 4, 5, 6}, wanted=4, tries=5)
    assert counts == (2, 0) and ids == [1, 2, 4, 5]
    counts, ids = collected(ranks=1, rank=0, differing={6}, wanted=4, tries=2)
    assert counts == (2, 3) and ids == [6, 0, 1, 2]


def test_answers_and_drawings_keep_their_shares_of_the_batch():
    """Prompts 2 and 3 of each round of four ask for images, of which only one differs, in the third round."""
    captions = {2, 3, 6, 7, 10, 11, 14, 15}
    counts, ids = collected(1, 0, differing={0, 1, 4, 5, 8, 9, 10}, wanted=4, tries=4, captions=captions)
    assert ids == [0, 1, 10, 2] and counts == (4, 1)
    counts, ids = collected(1, 0, differing={0, 5, 2, 7}, wanted=4, tries=4, captions=captions)
    assert ids == [0, 2, 5, 7] and counts == (2, 0)
    turns = {4, 5, 6, 7}  # a batch of captions behind one of questions takes no place of theirs
    assert collected(1, 0, differing={0, 1, *turns, 8}, wanted=4, tries=3, captions=turns)[1] == [0, 1, 8, 2]


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_those_that_would_be_chosen_if_all_rounds_were_kept(seed):
    rng = random.Random(seed)
    differing = {number for number in range(48) if rng.random() < 0.15}
    captions = {number for number in range(48) if rng.random() < 0.4}
    counts, ids = collected(1, 0, differing, wanted=8, tries=6, captions=captions)
    sizes = Counter(number in captions for number in range(8))
    for rounds in range(1, 7):
        numbers = range(8 * rounds)
        ranked = {kind: [(n not in differing, n // 8, n) for n in numbers if (n in captions) == kind] for kind in sizes}
        best = sorted(each for kind, size in sizes.items() for each in sorted(ranked[kind])[:size])
        filled = sum(equal for equal, _, _ in best)
        if len(best) == 8 and not filled:
            break
    assert (*counts, ids) == (rounds, filled, [number for _, _, number in best])


@pytest.mark.slow
@pytest.mark.parametrize(("differing", "rounds"), [([0, 2, 4, 6, 8, 10, 12, 14], 2), ([0, 1, 2, 3], 4)])
def test_two_ranks_share_what_they_find(differing, rounds):
    """Even prompts are rank 0's: with the first list rank 1 never finds a group by itself."""
    first, second = on_ranks(shared, differing)
    whole, ids = collected(ranks=1, rank=0, differing=set(differing), wanted=8, tries=4)
    assert first[:2] == second[:2] == whole and whole[0] == rounds
    assert len(first[2]) == len(second[2]) == 4 and sorted(first[2] + second[2]) == sorted(ids)


def test_rewards_that_are_compared_one_by_one_may_differ_where_their_sum_does_not():
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}

    def group(*scores, valid=True):
        named = [{"a": a, "b": b, "c": math.nan, "note": float(place)} for place, (a, b) in enumerate(scores)]
        return [
            Rollout(
                None, [1], None, "", False, 0,
                reward=each["a"] + each["b"], valid=valid, weights=weights, components=each,
            )
            for each in named
        ]  # fmt: skip

    told, equal = group((1, 0), (0, 1), (0.5, 0.5)), group((1, 0), (1, 0))
    assert not is_informative(told) and is_informative(told, apart=True)
    assert not is_informative(equal, apart=True)
    sums = group((0.1, 0.2), (0.3, 0))  # the same number in float32, by which advantages are computed
    assert sums[0].reward != sums[1].reward and not is_informative(sums)
    assert not is_informative(group((1, 0), (0, 1), valid=False), apart=True)


def test_groups_stay_where_they_are_as_long_as_there_is_room():
    refs = [GroupRef(False, 0, number, rank) for number, rank in enumerate((0, 0, 0, 1))]
    assert list(balanced(refs, [2, 2]).items()) == [(refs[0], 0), (refs[1], 0), (refs[3], 1), (refs[2], 1)]
