"""One rank alone calls no collective; what several ranks exchange is in tests/distributed."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from lightrft_visual.strategy import collectives


def test_a_rank_alone_calls_no_collective(tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for name in ("barrier", "all_reduce", "all_gather_object", "broadcast_object_list"):
            monkeypatch.setattr(dist, name, lambda *args, name=name, **kwargs: 1 / 0)
        values = torch.tensor([1.0, -2.0])
        collectives.barrier()
        for reduce in (collectives.all_reduce_sum, collectives.all_reduce_max):
            result = reduce(values)
            assert result.tolist() == [1.0, -2.0] and result is not values
        assert collectives.all_gather_object("x") == ["x"]
        assert collectives.broadcast_object({"a": 1}) == {"a": 1}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "known, threads",
    [
        ({"LOCAL_SIZE": "2"}, 4),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_SIZE": "16"}, 1),
        ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "7"}, None),
        ({"LOCAL_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_ranks_of_a_host_share_its_cores(monkeypatch, known, threads):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    collectives.share_cores()
    assert chosen == ([threads] if threads else [])
