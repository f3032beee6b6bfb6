"""Collectives that are also right in a single process without a process group, and what ranks of a host share."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if is_initialized() else 0


def is_rank_0() -> bool:
    return rank() == 0


def _alone() -> bool:
    """Whether there is nobody to talk to.

    A collective of one rank is skipped, and not only to save its cost: gloo copies large tensors in threads of its
    own, each of which opens an OpenMP team. libgomp then counts more threads than cores, stops spinning for good, and
    every parallel operation of the process becomes four to seven times slower.
    """
    return world_size() == 1


def barrier() -> None:
    if not _alone():
        dist.barrier()


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks; a new tensor, the argument stays as it was."""
    total = tensor.clone()
    if not _alone():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """Largest over all ranks, elementwise; a new tensor."""
    largest = tensor.clone()
    if not _alone():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def all_gather_object(value: Any) -> list[Any]:
    """The values of all ranks, in rank order. Pickles inside the process group only: never for data from outside."""
    if _alone():
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Rank `source`'s value on every rank."""
    if _alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def share_cores() -> None:
    """Divide this host's cores over its ranks, which would otherwise all start a thread for each of them.

    Ranks of a host: LOCAL_WORLD_SIZE (torchrun) or LOCAL_SIZE (DeepSpeed). OMP_NUM_THREADS, where set, stays.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
