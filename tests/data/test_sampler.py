"""The prompt order: complete, mixed by the asked shares, the same for any rank count, exact on resume."""

from collections import Counter
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightrft_visual.data.sampler as sampler_module
from lightrft_visual.data.sampler import PromptSampler, epoch_quotas, fitting_batch, interleaved
from lightrft_visual.errors import ConfigError, DataError

sizes_and_batch = st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 40))


def batches_of(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


def stream(sampler, rows):
    got = []
    while len(got) < rows:
        got += sampler.next_batch()
    return got[:rows]


@settings(max_examples=30, deadline=None)
@given(sizes_and_batch, st.integers(0, 2**40))
def test_every_epoch_holds_every_row_once(shape, seed):
    sizes, batch_size = shape
    total = sum(sizes)
    got = stream(PromptSampler(sizes, batch_size, seed=seed), 3 * total)
    for epoch in range(3):
        assert sorted(got[epoch * total : (epoch + 1) * total]) == list(range(total))


@settings(max_examples=30, deadline=None)
@given(sizes_and_batch, st.integers(0, 2**40), st.integers(0, 12), st.integers(1, 40))
def test_resuming_continues_the_same_stream_even_with_another_batch_size(shape, seed, done, other_batch):
    sizes, batch_size = shape
    sampler = PromptSampler(sizes, batch_size, seed=seed)
    for _ in range(done):
        sampler.next_batch()
    state = sampler.state_dict()
    expected = stream(sampler, 60)
    resumed = PromptSampler(sizes, other_batch, seed=seed)
    resumed.next_batch()
    resumed.load_state_dict(state)
    assert stream(resumed, 60) == expected


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 100))
def test_ranks_together_hold_the_global_batch_for_any_rank_count(per_rank, world_size, seed):
    batch = PromptSampler([50], per_rank * world_size, seed=seed).next_batch()
    shards = [PromptSampler.shard(batch, rank, world_size) for rank in range(world_size)]
    assert [shards[place % world_size][place // world_size] for place in range(len(batch))] == batch


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.05, 1)), min_size=1, max_size=4), st.integers(0, 2**40)
)  # fmt: skip
def test_mixing_meets_the_shares_in_every_epoch(parts, seed):
    sizes, probabilities = [size for size, _ in parts], [probability for _, probability in parts]
    sampler = PromptSampler(sizes, 7, seed=seed, probabilities=probabilities)
    got = stream(sampler, 2 * sampler.epoch_length)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    share = [probability / sum(probabilities) for probability in probabilities]
    ideal = min(size / s for size, s in zip(sizes, share))
    for epoch in range(2):
        rows = got[epoch * sampler.epoch_length : (epoch + 1) * sampler.epoch_length]
        for start, size, s in zip(starts, sizes, share):
            count = sum(start <= row < start + size for row in rows)
            assert abs(count - s * ideal) <= 1


def test_a_larger_data_set_is_walked_through_before_any_row_repeats():
    sampler = PromptSampler([5, 20], 10, seed=1, probabilities=[0.5, 0.5])
    assert sampler.quotas == [5, 5]
    counts = Counter(stream(sampler, 40))
    assert all(counts[row] == 4 for row in range(5))
    assert all(counts[row] == 1 for row in range(5, 25))


def test_a_data_set_of_a_tiny_share_gives_one_row_to_each_epoch():
    assert epoch_quotas([100, 100], [0.999, 0.001]) == [100, 1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=3), st.integers(1, 40), st.integers(0, 2**40))
def test_even_batches_have_their_share_of_every_data_set(sizes, batch_size, seed):
    sampler = PromptSampler(sizes, batch_size, seed=seed, mixing="even")
    total, starts = sum(sizes), [sum(sizes[:part]) for part in range(len(sizes))]
    for batch in batches_of(sampler, 6):
        for start, size in zip(starts, sizes):
            assert abs(sum(start <= row < start + size for row in batch) - batch_size * size / total) < 2
    for part in range(len(sizes)):
        turns = list(islice(cycle(sampler.pattern), 3 * batch_size))
        assert sampler._turns(part, 3 * batch_size) == turns.count(part)
    whole = PromptSampler(sizes, total, seed=seed, mixing="even")
    assert [sorted(whole.next_batch()) for _ in range(2)] == [list(range(total))] * 2


def test_in_turns_a_batch_is_of_one_data_set_and_shares_are_met():
    sampler = PromptSampler([8, 40], 4, seed=1, mixing="turns", probabilities=[0.25, 0.75])
    batches = [sampler.next_batch() for _ in range(16)]
    kinds = [{row < 8 for row in batch} for batch in batches]
    assert all(len(kind) == 1 for kind in kinds)
    assert [sum(kind == {True} for kind in kinds[start : start + 4]) for start in range(0, 16, 4)] == [1] * 4
    small = [row for batch in batches for row in batch if row < 8]
    assert sorted(small[:8]) == sorted(small[8:]) == list(range(8)) and small[:8] != small[8:]
    assert len({row for batch in batches[:13] for row in batch if row >= 8}) == 40


@pytest.mark.parametrize("mixing", ["even", "turns"])
def test_batches_mixed_by_a_pattern_do_not_read_all_of_it_again(monkeypatch, mixing):
    scans = []

    class Pattern(list):
        def __iter__(self):
            scans.append("iter")
            return super().__iter__()

        def __getitem__(self, at):
            scans.extend(["slice"] if isinstance(at, slice) else [])
            return super().__getitem__(at)

        def count(self, part):
            scans.append("count")
            return super().count(part)

    monkeypatch.setattr(sampler_module, "interleaved", lambda quotas: Pattern(interleaved(quotas)))
    batches_of(PromptSampler([40, 30, 20], 9, seed=1, mixing=mixing), 12)
    assert scans == ["iter"]


@pytest.mark.parametrize("mixing", ["even", "turns"])
def test_a_mixed_order_goes_on_where_it_stopped_with_the_same_batches(mixing):
    def made(size: int = 6, mixing: str = mixing) -> PromptSampler:
        return PromptSampler([7, 21], size, seed=2, mixing=mixing)

    sampler, resumed = made(), made()
    stream(sampler, 60)
    resumed.load_state_dict(sampler.state_dict())
    assert list(islice(resumed.upcoming(), 30)) == stream(sampler, 30) == stream(resumed, 30)
    for other, named in ((made(5), "batch_size was 6, now it is 5"), (made(mixing="shuffled"), "mixing was")):
        with pytest.raises(DataError, match=f"cannot resume the prompt order: {named}"):
            other.load_state_dict(sampler.state_dict())


def test_counting_batches_and_epochs():
    sampler = PromptSampler([10], 4, seed=0)
    assert [sampler.num_batches(epochs) for epochs in (1, 2, 3)] == [3, 5, 8]
    assert [len(batch) for batch in batches_of(sampler, 5)] == [4] * 5
    assert sampler.epoch == 2.0
    for rows, ranks, size in ((50, 1, 50), (50, 8, 48), (5, 8, 8)):  # no more than a pass over the data
        assert fitting_batch(128, rows, ranks) == size
    assert fitting_batch(16, 50, 8) == 16


@pytest.mark.parametrize(
    ("error", "told", "call"),
    [
        (ConfigError, "batch_size is 0", lambda: PromptSampler([3], 0, seed=0)),
        (ConfigError, "2 mixing probabilities for 1", lambda: epoch_quotas([3], [0.5, 0.5])),
        (ConfigError, "positive", lambda: epoch_quotas([3, 3], [1.0, 0.0])),
        (ConfigError, "prompt_data_probs", lambda: epoch_quotas([3, 4], [float("nan"), 0.5])),
        (ConfigError, "prompt_data_probs", lambda: epoch_quotas([3, 4], [1e308, 1e308])),
        (ConfigError, "prompt_data_probs", lambda: epoch_quotas([3, 4], [1e-300, 1e300])),
        (ConfigError, "6 prompts does not divide over 4", lambda: PromptSampler.shard(list(range(6)), 0, 4)),
        (DataError, r"rows of the data was \[10\], now it is \[11\].*--pretrain", lambda: resumed([11], 0)),
        (DataError, "cannot resume the prompt order: seed was 0.*--pretrain", lambda: resumed([10], 1)),
    ],
)
def test_impossible_arguments_and_other_data_are_refused(error, told, call):
    with pytest.raises(error, match=told):
        call()


def resumed(sizes, seed):
    PromptSampler(sizes, 4, seed=seed).load_state_dict(PromptSampler([10], 4, seed=0).state_dict())
