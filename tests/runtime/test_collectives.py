"""One rank alone calls no collective; what several ranks exchange is in tests/distributed."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from strict_group import DEVICE, two_strict_ranks

from lightrft_visual.algorithms import advantages
from lightrft_visual.algorithms import kl as reward_shaping
from lightrft_visual.algorithms import loss_terms as aggregation
from lightrft_visual.config.shared import RewardConfig
from lightrft_visual.rewards.engine import RewardComputationEngine
from lightrft_visual.rollout import parity
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.train_engine import TrainEngine
from lightrft_visual.trainer.run_state import RunState


def whiten() -> None:
    experience = SimpleNamespace(
        advantages=torch.ones(2, 3), action_mask=torch.ones(2, 3), valid=torch.ones(2), info={}
    )
    advantages._whiten([experience], images=False)


def invalid_rewards() -> None:
    engine = SimpleNamespace(config=RewardConfig(reward_max_invalid=1.0))
    RewardComputationEngine._check_invalid(engine, torch.tensor([True, False]), {"a": Counter(["b"])}, "cpu")


def parity_probe() -> None:
    stage = SimpleNamespace(generate=lambda *args, **kwargs: [])
    gate = parity.ParityGate(stage, None, None, None, pad_id=0, vision=False, device=torch.device("cpu"), tolerance=1.0)
    assert gate._largest(None, 1.0) == 0


def waiting_generation() -> None:
    engine = SimpleNamespace(in_step=True)
    assert TransformersEngine._most(engine, 3) == 3


def accumulated_loss() -> None:
    backend = SimpleNamespace(
        module=torch.nn.Identity(),
        set_gradient_accumulation_boundary=lambda last: None,
        backward=lambda loss, scale_wrt_gas: None,
    )
    engine = TrainEngine(backend, zero_stage=2, max_norm=1.0)
    told = torch.tensor([1.0, math.inf])
    assert engine.accumulate(torch.tensor(math.nan), last=True, told=told).tolist() == [[2.0, math.inf], [0.0, 0.0]]
    assert engine.poisoned


# Host tensors that ranks exchange, by where that happens.
SITES = {
    "denominators": lambda: aggregation.global_denominators([torch.ones(2, 3)], 8),
    "whitening": whiten,
    "running reward": lambda: reward_shaping.RunningMoments().update(torch.ones(3)),
    "invalid rewards": invalid_rewards,
    "parity": parity_probe,
    "generation in step": waiting_generation,
    "non-finite loss": accumulated_loss,
    "stop by signal": lambda: RunState.stop_requested(
        SimpleNamespace(
            _stop=SimpleNamespace(made=True),
            _interrupt=SimpleNamespace(first=False),
            manager=SimpleNamespace(behind=None, saved=[]),
        )
    ),
}


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


def test_groups_of_ranks_wait_as_long_as_all_ranks_do(monkeypatch):
    """Else PyTorch's own limits hold: a run that lets rewards take an hour would end after ten minutes on nccl."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options["timeout"])))
    monkeypatch.setattr(collectives, "world_size", lambda: 4)
    monkeypatch.setattr(collectives, "_limit", None)
    collectives.bound(3600)
    collectives.neighbours(2, tensors=True)
    assert made == [([0, 1], timedelta(hours=1)), ([2, 3], timedelta(hours=1))]


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


def test_host_tensors_reach_a_group_of_accelerators_and_come_back(monkeypatch):
    values = torch.tensor([1.0, -2.0])
    with two_strict_ranks(monkeypatch) as reduced:
        total, largest = collectives.all_reduce_sum(values), collectives.all_reduce_max(values)
        collectives.barrier()
        on_device = collectives.all_reduce_sum(values.to(DEVICE))
        assert on_device.device == DEVICE
        assert collectives.all_gather_object("x") == ["x", "x"] and collectives.broadcast_object("y") == "y"
    assert total.tolist() == [2.0, -4.0] and largest.tolist() == [1.0, -2.0] and values.tolist() == [1.0, -2.0]
    assert on_device.held.tolist() == [2.0, -4.0]
    assert reduced == [(2,), (2,), (1,), (2,)]


def test_a_group_that_takes_both_is_given_tensors_as_they_are(monkeypatch):
    values = torch.tensor([3.0])
    seen = []
    with two_strict_ranks(monkeypatch, backend="cpu:gloo,meta:nccl"):
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: seen.append(tensor.device.type))
        assert collectives.all_reduce_sum(values).tolist() == [3.0]
    assert seen == ["cpu"]


@pytest.mark.parametrize("site", sorted(SITES))
def test_every_site_reduces_through_a_group_of_accelerators(monkeypatch, site):
    with two_strict_ranks(monkeypatch) as reduced:
        SITES[site]()
    assert reduced


def test_only_this_room_calls_torchs_collectives():
    package = Path(collectives.__file__).parents[1]
    call = re.compile(r"\bdist(?:ributed)?\.(all_|broadcast|barrier|reduce|gather|scatter|send|recv|new_group)")
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path.parent.name != "runtime"
        for line in path.read_text().splitlines()
        if call.search(line)
    ]
    assert not found
