"""How long weights take to rollout workers on this host, beside the plain copy of as many bytes.

    python scripts/bench/weight_transfer.py [--mib 512] [--workers 2] [--rounds 9] [--copied]

Workers are real processes on Ray whose engine takes tensors over as engine `hf` and diffusion workers do, without a
copy; --copied: it copies them into parameters of its own, as vLLM does. The memory bandwidth is that of
`torch.Tensor.copy_` between buffers as large, alternating with the transfers: in one thread, and in as many as the
transfer uses in one process. CPU seconds are said too, by which a busy host can be judged: of a copy, of the trainer's
writing with checksums, of what a worker does. Last, a version with a wrong checksum is sent, which must be refused and
leave the weights as they were.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from lightrft_visual.config.placement import ResourcesConfig
from lightrft_visual.plugins.ray.rollout.pool import WorkerPool
from lightrft_visual.plugins.ray.rollout.ray_workers import Cluster
from lightrft_visual.plugins.ray.rollout.worker import Blueprint, Order
from lightrft_visual.rollout.weight_post import THREADS, WeightPost, WeightsRefused, take_over

T = torch.Tensor
TENSOR_MIB = 16


class Copies:
    """An engine that keeps what it is given, and says a number of it."""

    def __init__(self, count: int, copied: bool) -> None:
        weights = (torch.zeros(TENSOR_MIB * 2**18) for _ in range(count))
        self.own = {f"weight{i}": nn.Parameter(weight, requires_grad=False) for i, weight in enumerate(weights)}
        self.copied, self.spent, self.last = copied, 0.0, 0.0

    def update_weights(self, named_tensors: Iterable[tuple[str, T]]) -> None:
        for name, tensor in named_tensors:
            if self.copied:
                self.own[name].copy_(tensor)
            else:
                take_over(self.own[name], tensor)
        self.spent, self.last = time.process_time() - self.last, time.process_time()

    def reset_caches(self) -> None:
        """There are none."""

    def generate(self) -> list[float]:
        """A number of each tensor, and the CPU seconds that the process spent on the last version."""
        return [*(float(tensor[-1]) for tensor in self.own.values()), self.spent]


def now() -> np.ndarray:
    """Seconds by the clock, and of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def report(found: dict[str, list[np.ndarray]], bytes_: int, workers: int) -> None:
    """Medians of the rounds after the first two: seconds, and CPU seconds, of each part."""
    took = {name: np.median(each[2:], axis=0) for name, each in found.items()}
    copy, several, transfer = (took[name][0] for name in ("copy", "copies", "transfer"))
    writing = f"of which writing {took['writing'][0]:.3f}"
    print(f"{bytes_ / 2**20:.0f} MiB to {workers} workers: {transfer:.3f} s, {writing}")
    for what, seconds in (("one thread", copy), (f"{THREADS} threads", several)):
        print(
            f"copied once by {what} in {seconds:.3f} s ({bytes_ / seconds / 1e9:.1f} GB/s): the transfer takes "
            f"{transfer / seconds:.2f} times that"
        )
    cpu = ", ".join(f"{name} {took[name][1]:.3f}" for name in ("copy", "copies", "writing"))
    total = took["writing"][1] + took["workers"][1]
    print(
        f"CPU seconds: {cpu}, all workers {took['workers'][1]:.3f}; on {THREADS} idle cores the transfer would take "
        f"{total / THREADS / took['copy'][1]:.2f} times a copy"
    )


def refusal(pool: WorkerPool, post: WeightPost, weights: dict[str, torch.Tensor]) -> None:
    """Posts a version whose last bucket has a wrong checksum, and says what comes of it."""
    before = pool.submit().result(60)[0][:-1]
    posted = post.post(weights.items())
    last = posted.buckets[-1]
    wrong = replace(posted, buckets=(*posted.buckets[:-1], replace(last, checksum=last.checksum ^ 1)))
    try:
        pool.give_weights(wrong.number, wrong, at_once=True)
        print("a wrong checksum was NOT refused")
    except WeightsRefused as error:
        pool.give_weights(wrong.number - 1, None, at_once=False)
        print(f"refused: {error}; weights unchanged: {pool.submit().result(60)[0][:-1] == before}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--copied", action="store_true")
    parser.add_argument("--transfer", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    count = args.mib // TENSOR_MIB
    blueprint = Blueprint("weight_transfer:Copies", (count, args.copied), threads=1)
    resources = ResourcesConfig(rollout_num_workers=args.workers, rollout_num_cpus=0.5, weight_transfer=args.transfer)
    cluster = Cluster(resources, blueprint)
    pool, post = WorkerPool(cluster.workers), cluster.post()
    weights = {f"weight{i}": torch.full((TENSOR_MIB * 2**18,), float(i)) for i in range(count)}
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    bytes_ = sum(each.nbytes for each in weights.values())
    found: dict[str, list[np.ndarray]] = {"copy": [], "copies": [], "writing": [], "transfer": [], "workers": []}
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(args.rounds):
            began = now()
            for name, tensor in weights.items():
                copies[name].copy_(tensor)
            found["copy"].append(now() - began)
            began = now()
            list(threads.map(lambda name: copies[name].copy_(weights[name]), weights))
            found["copies"].append(now() - began)
            began = now()
            posted = post.post(weights.items())
            found["writing"].append(now() - began)
            pool.give_weights(posted.number, posted, at_once=True)
            found["transfer"].append(now() - began)
            order = Order(posted.number, posted=None)
            spent = [worker.call("run", order, ())[0][-1] for worker in cluster.workers]
            found["workers"].append(np.array([0.0, sum(spent)]))
            for tensor in weights.values():
                tensor += 1
    report(found, bytes_, args.workers)
    refusal(pool, post, weights)
    pool.close()
    cluster.close()


if __name__ == "__main__":
    main()
