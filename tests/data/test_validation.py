"""Validation prompts over ranks: each real one exactly once, the same count everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft_visual.data.validation import validation_shard_indices


def test_strided_and_padded():
    assert validation_shard_indices(5, rank=0, world_size=2) == [(0, True), (2, True), (4, True)]
    assert validation_shard_indices(5, rank=1, world_size=2) == [(1, True), (3, True), (0, False)]


@given(st.integers(0, 60), st.integers(1, 9))
def test_every_prompt_is_real_exactly_once(prompts, world_size):
    shards = [validation_shard_indices(prompts, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    assert sorted(index for shard in shards for index, is_real in shard if is_real) == list(range(prompts))
    assert all(0 <= index < prompts for shard in shards for index, _ in shard)


@pytest.mark.parametrize("arguments", [(-1, 0, 1), (3, 2, 2), (3, -1, 2), (3, 0, 0)])
def test_impossible_arguments_are_value_errors(arguments):
    prompts, rank, world_size = arguments
    with pytest.raises(ValueError):
        validation_shard_indices(prompts, rank=rank, world_size=world_size)
