"""K-repeat sampling: every chosen prompt exactly k times over all ranks, the same batch computed on every rank.
Validation prompts over ranks: each real one exactly once, the same count everywhere."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.data.prompt_sampling import distributed_k_repeat_indices
from lightrft_visual.data.validation import validation_shard_indices


@st.composite
def configurations(draw):
    world_size = draw(st.integers(1, 9))
    batch_size = draw(st.integers(1, 24))
    total = world_size * batch_size
    repeats = draw(st.sampled_from([k for k in range(1, total + 1) if total % k == 0]))
    rows = draw(st.integers(total // repeats, total // repeats + 200))
    return rows, batch_size, repeats, world_size, draw(st.integers(0, 2**62))


@settings(max_examples=60, deadline=None)
@given(configurations())
def test_every_chosen_prompt_comes_exactly_k_times(configuration):
    rows, batch_size, repeats, world_size, seed = configuration
    samples = [
        distributed_k_repeat_indices(
            dataset_length=rows, batch_size=batch_size, repeats_per_prompt=repeats,
            world_size=world_size, rank=rank, seed=seed,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    counts = Counter(index for sample in samples for index in sample.local_indices)
    assert set(counts.values()) == {repeats}
    assert all(0 <= index < rows for index in counts)
    assert {sample.unique_prompt_count for sample in samples} == {len(counts)} == {world_size * batch_size // repeats}
    assert {len(sample.local_indices) for sample in samples} == {batch_size}


def test_the_order_follows_the_stated_recipe():
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randperm(10, generator=generator)[:4].tolist()
    repeated = [index for index in chosen for _ in range(3)]
    expected = [repeated[place] for place in torch.randperm(12, generator=generator).tolist()]
    got = [
        index
        for rank in range(2)
        for index in distributed_k_repeat_indices(
            dataset_length=10, batch_size=6, repeats_per_prompt=3, world_size=2, rank=rank, seed=np.int64(5)
        ).local_indices
    ]
    assert got == expected


@pytest.mark.parametrize(
    "change",
    [{"dataset_length": 0}, {"batch_size": 0}, {"repeats_per_prompt": -1}, {"world_size": 0}, {"rank": 2},
     {"rank": -1}, {"repeats_per_prompt": 5}, {"dataset_length": 3}],
)  # fmt: skip
def test_impossible_arguments_are_value_errors(change):
    arguments = {"dataset_length": 8, "batch_size": 6, "repeats_per_prompt": 3, "world_size": 2, "rank": 0, "seed": 1}
    with pytest.raises(ValueError):
        distributed_k_repeat_indices(**arguments | change)


def test_validation_shards_are_strided_and_padded_and_impossible_ones_value_errors():
    assert validation_shard_indices(5, rank=0, world_size=2) == [(0, True), (2, True), (4, True)]
    assert validation_shard_indices(5, rank=1, world_size=2) == [(1, True), (3, True), (0, False)]
    for prompts, rank, world_size in ((-1, 0, 1), (3, 2, 2), (3, -1, 2), (3, 0, 0)):
        with pytest.raises(ValueError):
            validation_shard_indices(prompts, rank=rank, world_size=world_size)


@settings(max_examples=30)
@given(st.integers(0, 60), st.integers(1, 9))
def test_every_prompt_is_real_exactly_once(prompts, world_size):
    shards = [validation_shard_indices(prompts, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    assert sorted(index for shard in shards for index, is_real in shard if is_real) == list(range(prompts))
    assert all(0 <= index < prompts for shard in shards for index, _ in shard)
