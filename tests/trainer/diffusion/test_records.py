"""What a diffusion step sends to other ranks for the records that it keeps."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightrft_visual.config.diffusion import DiffusionRunConfig
from lightrft_visual.strategy import collectives
from lightrft_visual.trainer.diffusion.maker import DrawnExperience
from lightrft_visual.trainer.diffusion.trainer import DiffusionTrainer

SAMPLES, KEPT = 24, 6


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Bytes of each object that goes to the other one of two ranks, which has drawn the same."""
    found: list[int] = []

    def all_gather_object(gathered, value, group=None):
        content = pickle.dumps(value)
        found.append(len(content))
        gathered[:] = [pickle.loads(content) for _ in gathered]

    monkeypatch.setattr(collectives, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    return found


def step(shape: tuple[int, ...], **output):
    """(the step's records, its media): two micro-batches, whose media are joined as the maker joins them."""
    trainer = object.__new__(DiffusionTrainer)
    trainer.config, trainer.step = DiffusionRunConfig(), 3
    trainer.config.output.num_trajectories_to_save = KEPT
    vars(trainer.config.output).update(output)
    media = torch.rand(SAMPLES, *shape)
    half = SAMPLES // 2
    experiences = [
        SimpleNamespace(
            info={"reward": torch.rand(half), "reward_metrics": {"pixel": torch.rand(half)}},
            valid=torch.ones(half, dtype=torch.bool),
        )
        for _ in range(2)
    ]
    rows = SimpleNamespace(
        prompts=["a red circle"] * SAMPLES, group_ids=torch.arange(SAMPLES) // 4, sample_ids=torch.arange(SAMPLES)
    )
    return trainer._records_of(rows, DrawnExperience(experiences, media, {}, [])), media


@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 5, 32, 48)])
def test_a_rank_sends_the_uint8_pixels_of_the_records_that_it_keeps(sent, shape):
    records, media = step(shape)
    assert len(sent) == 1 and sent[0] <= 1.1 * KEPT * media[0].numel()
    assert len(records) == KEPT  # of both ranks
    kept = [(record.get("images") or record["videos"])[0] for record in records]
    assert all(each.size == media[0].numel() and each.dtype == "uint8" for each in kept)


def test_nothing_is_sent_where_no_rollouts_are_kept(sent):
    records, _ = step((3, 64, 64), save_trajectories=False)
    assert records == [] and sent == []
