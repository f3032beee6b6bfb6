"""Seconds of what a plan counts: of products, of the bytes that other operations move, of starting operations.

A small operation takes an accelerator less time than its start takes the host, so each kind of time may be the longer.
The numbers here are of the cards of docs/benchmarks.md, section "One card"; what is a card's own is in
`config/placement.py`. `scripts/bench/plan_vs_measured.py` holds the results against measured times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import hypot
from time import perf_counter

import torch

from ...config.placement import Device
from .meta import Work
from .zero import FP32, Model, Zero

# Of an accelerator's bfloat16 products and of its memory's bandwidth: a profile of a Flow-GRPO update of SD3.5 medium,
# 0.93 s of the card for 12 micro-batches. Activations of such sizes partly stay in the card's cache, so that the
# bandwidth is all of the data sheet's.
PRODUCTS, MOVED = 0.6, 1.0
FLOAT32 = 1 / 15  # of a card's bfloat16 products, without TF32: data sheets of A100 and H100
CALL = 22e-6  # seconds of an operation on the host, views among them: between the hosts of an H100 and of an H200
ENGINE_CALLS = 50  # of a layer in a decoding step of an engine without CUDA graphs: the same step's 10.8 s
GRAPH_STEP = 0.005  # seconds of a decoding step with CUDA graphs, at least; an estimate
SYNC_CALLS = 20  # of a weight that an engine takes over, adapters merged: 0.8 s of a GRPO step, and 0.51 on the H200
# On the CPU: of the products that a large matrix reaches, by a GRPO step of a model of 100 million weights; operations
# of the smallest size that one of a model takes the time of, by one of the embedded model. Both with engine hf.
HOST_PRODUCTS, HOST_CALL = 0.7, 3.0
STEP_CALLS = 20  # of a trained tensor in an optimizer step and DeepSpeed's buffers around it; an estimate
STEP_BYTES = 7 * FP32  # of a trained number: gradient, weight and two moments read, all but the first written
# Bytes a second that a card sends to others of its host: NVLink, of the vendors' data sheets; others by PCIe. Between
# hosts a network of 400 Gbit/s for each card.
PEERS, NETWORK = {"a100": 300e9, "b200": 900e9, "h100": 450e9, "h200": 450e9, "h20-": 450e9}, 50e9
REACHED = 0.7  # of such a bandwidth, by large all-reduces
DISK = 2e9  # bytes a second of a checkpoint that is read
HOST_MEMORY = 20e9  # bytes a second of one rank's share of a host with accelerators; an estimate


@dataclass(frozen=True)
class Speeds:
    """Of one rank: products and bytes a second, seconds of a call, bytes a second from and to other ranks and the host.

    zero: by which models are divided. alone: whether the host computes itself, so that nothing overlaps.
    """

    zero: Zero
    products: float
    moved: float
    call: float
    peers: float
    link: float
    alone: bool

    @classmethod
    def of(cls, device: Device, width: int, zero: Zero, local: int) -> Speeds:
        """Of a device.

        Args:
            device: of each rank.
            width: bytes of a weight; cards multiply those of float32 more slowly.
            zero: of all ranks.
            local: those of a host. More ranks than these reach each other by the network.
        """
        if device.on_cpu:
            call, own = HOST_CALL * smallest_call(), device.bandwidth
            return cls(zero, HOST_PRODUCTS * device.flops, own, call, own, own, alone=True)
        near = next((each for name, each in PEERS.items() if device.name.startswith(name)), device.link)
        peers = REACHED * (near if zero.ranks <= local else min(near, NETWORK))
        products = PRODUCTS * device.flops * (FLOAT32 if width == FP32 else 1.0)
        return cls(zero, products, MOVED * device.bandwidth, CALL, peers, device.link, alone=False)

    def seconds(self, work: Work) -> float:
        """Of a computation. Host and card work side by side, and wait for each other now and then: where both take
        equally long, longer than either, as five denoising steps a forward did (docs/benchmarks.md)."""
        device, host = work.flops / self.products + work.moved / self.moved, work.calls * self.call
        return device + host if self.alone else hypot(device, host)

    def decoding(self, steps: float, weights: float, cache: float, work: Work, graphs: bool) -> float:
        """Of an engine's decoding.

        Args:
            steps: of it, each a token of every sample.
            weights: bytes of them that a step reads.
            cache: bytes of keys and values that a step reads.
            work: of one step.
            graphs: whether the operations of a step are started together.
        """
        host = GRAPH_STEP if graphs else work.calls * self.call
        device = (weights + cache) / self.moved
        return steps * (device + host + work.flops / self.products if self.alone else hypot(device, host))

    def optimizer_step(self, model: Model, tensors: int) -> float:
        """Of AdamW over this rank's part of a model with so many tensors that train, on the host with adam_offload."""
        part = model.trained / self.zero.share(1)
        if self.zero.config.adam_offload and not self.alone:
            return part * ((STEP_BYTES + model.width) / HOST_MEMORY + (FP32 + model.width) / self.link)
        return self.seconds(Work(moved=part * (STEP_BYTES + model.width), calls=tensors * STEP_CALLS))

    def reducing(self, model: Model, micro_batches: int) -> float:
        """Of the gradients of an update, of so many micro-batches on this rank, between ranks, and of what the ranks
        tell each other of the new weights.

        Stage 2 and 3 reduce every micro-batch to parts, the others once; stage 0 to all ranks.
        """
        ranks, stage = self.zero.ranks, self.zero.stage
        size, others = model.trained * model.width / self.peers, (ranks - 1) / ranks
        times = micro_batches if stage >= 2 else 1
        return others * size * (times + (stage < 3))

    def writing(self, size: float) -> float:
        """Of so many bytes of an export: to the host, to the disk, and read for their hashes."""
        return size / self.link + 2 * size / DISK

    def gathering(self, model: Model, passes: float) -> float:
        """Of the whole model by stage 3, for each of so many forwards and backwards; the others gather nothing."""
        ranks = self.zero.ranks
        return passes * model.bytes * (ranks - 1) / ranks / self.peers if self.zero.stage == 3 else 0.0


@cache
def products_a_thread() -> float:
    """Floating point operations a second of a thread of this process: the best of some products of float32, 20 ms."""
    size, ends = 384, perf_counter() + 0.02
    matrix, best = torch.ones(size, size), float("inf")
    while perf_counter() < ends or best == float("inf"):
        began = perf_counter()
        matrix @ matrix
        best = min(best, perf_counter() - began)
    return 2 * size**3 / best / torch.get_num_threads()


@cache
def smallest_call() -> float:
    """Seconds of an operation on eight numbers on this host, the best of some."""
    numbers, best = torch.ones(8), float("inf")
    for _ in range(20):
        began = perf_counter()
        for _ in range(50):
            numbers.add(1)
        best = min(best, (perf_counter() - began) / 50)
    return best
