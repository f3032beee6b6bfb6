"""Run by two ranks: selective replay over two steps, each rank with every second sample."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from replay_cases import text_item

from lightrft_visual.experience.buffer import NaiveReplayBuffer
from lightrft_visual.runtime.checkpoint.state import save_state
from lightrft_visual.trainer.features.selective_replay import SelectiveReplay

STEPS = [1.0, -2.0, 0.5, 3.0, 0.0, 0.1], [0.0, 0.0, 1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]


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


def refilled(replay: SelectiveReplay, step: int, rank: int = 0, ranks: int = 1):
    """The buffer of a step, and what refilling it says."""
    buffer = filled_buffer(STEPS[step], 6 * step, step, rank, ranks)
    return buffer, replay.refill(buffer, step)


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replay, small = (SelectiveReplay(capacity=capacity, seed=0) for capacity in (100, 4))
    for step in (0, 1):
        buffer, found = refilled(replay, step, rank, ranks)
        refilled(small, step, rank, ranks)
    told = {"replaced": found.replaced, "numbers": [int(item.sample_id) for item in buffer]}
    told["kept"] = [int(item.sample_id) for item in small.kept]
    save_state(Path(out, f"state_{rank}.safetensors"), small.state_dict())
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
