"""Which pairs of a file each step of offline Diffusion-DPO trains on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightrft_visual.data.prompts import PromptRow
from lightrft_visual.runtime import collectives
from lightrft_visual.trainer.diffusion.parts import DrawingSource

PAIRS = [PromptRow(prompt=f"pair {number}", images=[]) for number in range(10)]


def prompts_of(monkeypatch, step, rank=0, world=1, seed=1):
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "world_size", lambda: world)
    config = SimpleNamespace(
        offline=True, sampling=SimpleNamespace(rollout_batch_size=4), train=SimpleNamespace(seed=seed),
        asynchronous=SimpleNamespace(ahead=0),
    )  # fmt: skip
    batch = DrawingSource(config, PAIRS).next(step, 100)
    return batch.prompts, batch.sample_ids.tolist()


def test_each_pair_comes_once_in_an_epoch_whose_order_is_another_one_than_the_last(monkeypatch):
    seen = [prompt for step in range(5) for prompt in prompts_of(monkeypatch, step)[0]]
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == sorted(each.prompt for each in PAIRS)
    assert first != second
    assert prompts_of(monkeypatch, 0, seed=2)[0] != first[:4]


@pytest.mark.parametrize("step", [0, 2, 7])
def test_the_pairs_of_a_step_are_the_same_on_other_numbers_of_ranks(monkeypatch, step):
    prompts, ids = prompts_of(monkeypatch, step)
    parts = [prompts_of(monkeypatch, step, rank, 2) for rank in range(2)]
    assert [sum(each, []) for each in zip(*parts)] == [prompts, ids]
