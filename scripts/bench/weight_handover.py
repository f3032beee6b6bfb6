"""CPU milliseconds of handing the weights of a model over on two ranks with ZeRO-3: one by one, and in buckets.

    python scripts/bench/weight_handover.py [--hidden 256] [--layers 24] [--rounds 7]

Two ranks of gloo on this machine divide a Qwen2.5-VL; both forms run in turn. Wall time is given too, which other
programs on the machine disturb. The weights of both forms are compared bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RANKS = 2


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def start_ranks() -> int:
    """Runs this script once a rank; their exit code."""
    from lightrft_visual.runtime.host import free_port

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | shared | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def engine_of(hidden: int, layers: int):
    """A divided model under DeepSpeed, and how many weights it has."""
    import torch
    from transformers import AutoModelForImageTextToText

    from lightrft_visual.config.vl import DistributedConfig
    from lightrft_visual.models.tiny.vlm import build_tokenizer, tiny_config
    from lightrft_visual.models.vlm.actor import Actor
    from lightrft_visual.runtime.deepspeed import DeepspeedStrategy, OptimizerSettings

    torch.set_num_threads(1)
    strategy = DeepspeedStrategy(DistributedConfig(zero_stage=3))
    strategy.setup_distributed()
    tokenizer = build_tokenizer(["a red circle"])
    config = tiny_config("qwen2_5_vl", tokenizer, tie_embeddings=False, hidden=hidden, layers=layers)
    model = AutoModelForImageTextToText.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    return strategy.prepare(Actor(model, [], [0]), OptimizerSettings(1e-3, total_steps=1)), count


def main() -> int:
    arguments = arguments_of()
    if "RANK" not in os.environ:
        return start_ranks()
    import torch

    from lightrft_visual.launch import quiet_libraries
    from lightrft_visual.rollout.weight_sync import BUCKET_BYTES, named_weights

    quiet_libraries()
    engine, count = engine_of(arguments.hidden, arguments.layers)
    forms = {"one by one": 1, "in buckets": BUCKET_BYTES}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    sent: dict[str, dict[str, torch.Tensor]] = {}
    for _ in range(arguments.rounds):
        for name, size in forms.items():
            torch.distributed.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            sent[name] = dict(named_weights(engine, bucket_bytes=size))
            taken[name].append((1000 * (time.process_time() - cpu), 1000 * (time.perf_counter() - wall)))
    first, second = sent.values()
    if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
        raise SystemExit("the two forms gave other weights")
    if os.environ["RANK"] == "0":
        print(f"{len(first)} weights, {count / 1e6:.1f} million numbers, {RANKS} ranks")
        for name, figures in taken.items():
            cpu, wall = (statistics.median(column) for column in zip(*figures))
            print(f"{name}: {cpu:.1f} ms CPU, {wall:.1f} ms wall")
    return 0


if __name__ == "__main__":
    sys.exit(main())
