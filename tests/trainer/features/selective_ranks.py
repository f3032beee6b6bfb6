"""Run by two ranks: selective replay over two steps, each rank with every second sample."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from replay_cases import text_item

from lightrft_visual.replay.buffer import NaiveReplayBuffer
from lightrft_visual.trainer.features.selective_replay import SelectiveReplay


def sample(number: int, advantage: float, version: int):
    return text_item(
        length=4 + number % 3,
        action_log_probs=torch.full((2,), -1.0 - number),
        advantages=torch.full((2,), advantage),
        sample_id=torch.tensor(number),
        group_id=torch.tensor(number // 2),
        policy_version=torch.tensor(version),
        valid=torch.tensor(True),
    )


def filled_buffer(advantages: list[float], start: int = 0, version: int = 0, rank: int = 0, ranks: int = 1):
    buffer = NaiveReplayBuffer(2)
    for place, advantage in enumerate(advantages):
        if place % ranks == rank:
            buffer.items.append(sample(start + place, advantage, version))
    return buffer


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replay = SelectiveReplay(capacity=100, seed=0)
    for step, advantages in enumerate(([1.0, -2.0, 0.5, 3.0, 0.0, 0.1], [0.0, 0.0, 1.0, 0.0, 0.0, 2.0])):
        buffer = filled_buffer(advantages, 6 * step, step, rank, ranks)
        refilled = replay.refill(buffer, step)
    told = {"replaced": refilled.replaced, "numbers": [int(item.sample_id) for item in buffer]}
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
