"""Replay buffer figures: seconds to split and make N samples with images, and how full token-budget batches are.

    python scripts/bench/replay.py [--sizes 512 1024 2048 4096] [--repeats 7]

The growth is the exponent p of time ~ items ** p between the smallest and the largest size: 1 is linear, 2 quadratic;
caches add up to a quarter. Exits with 1 if it exceeds 1.4, or if more than 2 % of the token budget stays empty.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from lightrft_visual.experience.batch_plan import (
    SampleRef,
    moves_between_ranks,
    plan_by_tokens,
    unused_share,
    waiting_share,
)
from lightrft_visual.experience.items import BufferItemVL, items_equal, make_experience_batch, split_experience_batch

PATCH_DIM = 384  # 3 channels x 2 frames x 8 x 8 pixels
MAX_GROWTH = 1.4
MAX_EMPTY = 0.02


def make_items(count: int, seed: int = 0) -> list[BufferItemVL]:
    """Samples of 40 to 100 tokens with no image, or one to three of 4 patches.

    Small images, because from about 100 MB on, the operating system's fresh pages cost more than all the rest.
    """
    draw = random.Random(seed)
    return [_make_item(index, draw.randint(8, 32), draw.randint(32, 68), draw.randint(0, 3)) for index in range(count)]


def _make_item(index: int, actions: int, prompt: int, images: int) -> BufferItemVL:
    per_action = {name: torch.randn(actions) for name in ("action_log_probs", "rollout_log_probs", "advantages")}
    return BufferItemVL(
        sequences=torch.randint(1, 1000, (prompt + actions,)),
        pixel_values=torch.randn(4 * images, PATCH_DIM) if images else None,
        image_grid_thws=torch.tensor([[1, 2, 2]] * images) if images else None,
        attention_mask=torch.ones(prompt + actions, dtype=torch.long),
        action_mask=torch.ones(actions, dtype=torch.bool),
        info={"reward": index / 7, "reward_metrics": {"format": torch.tensor(1.0)}, "kind": "count"},
        sample_id=torch.tensor(index),
        group_id=torch.tensor(index // 8),
        **per_action,
    )


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Shortest of `repeats` runs, in processor time, so that other work on the machine counts little."""
    return min(timeit.repeat(function, timer=time.process_time, number=1, repeat=repeats))


def time_round_trips(sizes: list[int], repeats: int) -> bool:
    """Print a table of seconds; whether both directions grow linearly and give back the same samples."""
    print(f"{'items':>6} {'form':>7} {'make s':>8} {'split s':>8} {'make us/item':>13} {'split us/item':>14}")
    fine = True
    for packed in (False, True):
        times = []
        for size in sizes:
            items = make_items(size)
            batch = make_experience_batch(items, packed)
            fine = fine and all(map(items_equal, items, split_experience_batch(batch)))
            made = seconds(partial(make_experience_batch, items, packed), repeats)
            split = seconds(partial(split_experience_batch, batch), repeats)
            times.append((made, split))
            micro = [1e6 * each / size for each in times[-1]]
            form = "packed" if packed else "padded"
            print(f"{size:>6} {form:>7} {made:>8.3f} {split:>8.3f} {micro[0]:>13.1f} {micro[1]:>14.1f}")
        growth = [math.log(last / first, sizes[-1] / sizes[0]) for first, last in zip(times[0], times[-1])]
        print(f"growth exponent: make {growth[0]:.2f}, split {growth[1]:.2f}")
        fine = fine and max(growth) <= MAX_GROWTH
    return fine


def measure_packing(sizes: list[int], budget: int) -> bool:
    """Print how much of the budget stays empty for lengths as of long answers; whether it is little at most sizes."""
    print(f"\n{'items':>6} {'ranks':>5} {'micro-batches':>13} {'empty %':>8} {'waiting %':>9} {'padded rows %':>13}")
    worst = 0.0
    for ranks in (1, 2, 8):
        for size in sizes:
            step = _long_answers(size * ranks, ranks)
            target = dict(moves_between_ranks(step, ranks, by_tokens=True))
            moved = [replace(sample, rank=target.get(sample, sample.rank)) for sample in step]
            plans = plan_by_tokens(moved, ranks, budget)
            empty, waiting = unused_share(plans, budget), waiting_share(plans)
            shares = f"{100 * empty:>8.2f} {100 * waiting:>9.2f} {100 * _padding_of_rows(step, 8):>13.1f}"
            print(f"{size:>6} {ranks:>5} {len(plans[0]):>13} {shares}")
            worst = max(worst, empty)
    return worst <= MAX_EMPTY


def _long_answers(count: int, ranks: int) -> list[SampleRef]:
    draw = random.Random(1)
    tokens = [min(2048, 200 + int(draw.lognormvariate(5.5, 0.8))) for _ in range(count)]
    return [SampleRef(index % ranks, index, size, index) for index, size in enumerate(tokens)]


def _padding_of_rows(step: list[SampleRef], rows: int) -> float:
    """Share of padding in plain batches of `rows` samples, for comparison."""
    batches = [[sample.tokens for sample in step[start : start + rows]] for start in range(0, len(step), rows)]
    return 1 - sum(map(sum, batches)) / sum(max(batch) * len(batch) for batch in batches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--token_budget", type=int, default=4096)
    arguments = parser.parse_args()
    linear = time_round_trips(arguments.sizes, arguments.repeats)
    full = measure_packing(arguments.sizes, arguments.token_budget)
    print(f"\nlinear and exact: {linear}; at most {MAX_EMPTY:.0%} of the budget empty: {full}")
    return 0 if linear and full else 1


if __name__ == "__main__":
    sys.exit(main())
