"""Time and bytes of an exchange of samples between two ranks: parcels against plain pickles.

    python scripts/bench/exchange.py --images 128 --patches 1200

Two processes of gloo on this host. Each sends the other half of its samples: `images` prompts over both ranks, of
`patches` patches each, with `samples` samples a prompt that share them. Both ways in turn, three times; medians.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from lightrft_visual.experience.items import BufferItemVL
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.runtime import collectives
from lightrft_visual.runtime.host import free_port
from lightrft_visual.runtime.parcels import pack

PATCH = 1176  # numbers of a patch of Qwen2.5-VL: 3 channels, 2 frames, 14 x 14 pixels
RANKS = 2


def items(images: int, patches: int, samples: int) -> list[BufferItemVL]:
    """The samples of this rank's prompts."""
    made = []
    for _ in range(images // RANKS):
        grid = torch.tensor([[1, 1, patches]])
        shared = {"pixel_values": torch.randn(patches, PATCH), "image_grid_thw": grid}
        for _ in range(samples):
            made.append(BufferItemVL(sequences=torch.arange(patches // 4 + 200), vision=VisionTensors([shared])))
    return made


def by_pickle(parcels: list) -> list:
    """What stood here before: one pickle a receiving rank."""
    sent = [torch.frombuffer(bytearray(pickle.dumps(parcel)), dtype=torch.uint8) for parcel in parcels]
    sizes = torch.tensor([len(each) for each in sent])
    arriving = collectives._all_to_all(sizes, [1] * len(sent), [1] * len(sent)).tolist()
    received = collectives._all_to_all(torch.cat(sent), sizes.tolist(), arriving)
    return [pickle.loads(each.numpy().tobytes()) for each in received.split(arriving)]


def measured(exchange, parcels: list) -> tuple[float, float]:
    """(wall, CPU) seconds of one exchange."""
    collectives.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    exchange(parcels)
    return time.perf_counter() - wall, time.process_time() - cpu


def rank_main(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    held = items(arguments.images, arguments.patches, arguments.samples)
    parcels = [held[: len(held) // 2] if other != rank else [] for other in range(RANKS)]
    ways = {"parcels": collectives.exchange_objects, "pickles": by_pickle}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(3):
        for name, exchange in ways.items():
            times[name].append(measured(exchange, parcels))
    if rank == 0:
        images = sum(parcel.vision.samples[0]["pixel_values"].nbytes for parcel in parcels[1][:: arguments.samples])
        sizes = {"parcels": len(pack(parcels[1])), "pickles": len(pickle.dumps(parcels[1]))}
        for name in ways:
            wall, cpu = (statistics.median(values) for values in zip(*times[name]))
            print(f"{name}: {wall:.2f} s, {cpu:.2f} s of CPU, {sizes[name] / images:.3f} x the patches sent")
        print(f"patches sent by a rank: {images / 2**20:.0f} MiB; peak of this process: {peak_gib():.1f} GiB")
    dist.destroy_process_group()


def peak_gib() -> float:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("images", 128), ("patches", 1200), ("samples", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    multiprocessing.spawn(rank_main, (free_port(), parser.parse_args()), RANKS)
