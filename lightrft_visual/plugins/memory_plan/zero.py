"""What DeepSpeed holds of a model that it trains, by ZeRO stage. Facts of DeepSpeed 0.19.

For T trained numbers over N ranks: stage 1 divides fp32 weights and Adam's two moments, stage 2 also the gradients
once they are reduced, stage 3 also the weights. Stage 0 divides nothing. Stage 1 that adds gradients of bf16 weights up
in fp32 is DeepSpeed's BF16_Optimizer, which has the whole sums on each rank from the start, beside the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from torch import nn

from ...config.shared import FULL, DistributedConfig
from ...rollout.weight_sync import BUCKET_BYTES
from ...runtime.zero3_loading import blocks_at_once
from .table import HOST, Item

FP32 = 4
BUCKETS = "buckets of gradients"
BUCKET = 500_000_000  # numbers of a reduction bucket, whole however small the model is
LIVE = 1_000_000_000  # weights that stage 3 keeps gathered at most, beside the one it gathers
SUBGROUP = 1_000_000_000  # numbers of a rank that stage 3 steps at once


@dataclass(frozen=True)
class Model:
    """Numbers of a model: trained, frozen, of its largest trained and its largest weight; bytes of one number; numbers
    of the largest block that stage 3 gathers at once, and of each trained weight. name: in the items."""

    trained: int
    frozen: int
    largest: int
    widest: int
    width: int
    block: int = 0
    each: tuple[int, ...] = ()
    name: str = ""

    @classmethod
    def of(cls, module: nn.Module, width: int) -> Model:
        """Of a module as it is, with what it freezes; the weights will take `width` bytes each."""
        trained = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
        every = [parameter.numel() for parameter in module.parameters()]
        block = max(blocks_at_once(module).values(), default=0)
        largest = max(trained, default=0)
        return cls(sum(trained), sum(every) - sum(trained), largest, max(every), width, block, tuple(trained))

    @property
    def numbers(self) -> int:
        """All of them."""
        return self.trained + self.frozen

    @property
    def bytes(self) -> int:
        """Of the whole model's weights."""
        return self.numbers * self.width


def in_use(config: Any, **own: bool) -> frozenset[str]:
    """Settings that are on, by the words of the items' advice. own: of this kind of run."""
    model, zero = config.model, config.distributed
    on = {
        "bf16": model.bf16,
        "gradient_checkpointing": model.gradient_checkpointing == FULL,
        "lora_rank": model.lora_rank > 0,
        "zero_stage 2": zero.zero_stage >= 2,
        "zero_stage 3": zero.zero_stage == 3,
        "adam_offload": zero.adam_offload,
        "reward_cpu_offload": config.reward.reward_cpu_offload,
    }
    return frozenset(name for name, there in (on | own).items() if there)


def rounded(name: str, sizes: Iterable[float], dealt: Iterable[float] = (), ranks: int = 1) -> list[Item]:
    """What page-locked tensors take beside their bytes: PyTorch's allocator of such memory gives each the next power of
    two. Other memory of the host is taken as it is asked for.

    Args:
        name: of the tensors.
        sizes: bytes of those of this rank.
        dealt: of those that are dealt out to the ranks.
        ranks: how many they are.
    """
    more, others = (sum(2.0 ** ceil(log2(size)) - size for size in each if size > 0) for each in (sizes, dealt))
    more += others / ranks
    return [Item(f"{name}, page-locked to powers of two", more, where=HOST)] if more else []


@dataclass(frozen=True)
class Zero:
    """The settings that decide who holds what."""

    config: DistributedConfig
    ranks: int
    on_cpu: bool

    @property
    def stage(self) -> int:
        """ZeRO's."""
        return self.config.zero_stage

    def share(self, stage: int) -> int:
        """By how many ranks something is divided that is whole below this stage."""
        return self.ranks if self.stage >= stage else 1

    def divided(self, size: float) -> float:
        """Bytes on this rank of weights that stage 3 divides, with zpg once more among so many ranks."""
        again = size / self.config.zpg if self.config.zpg > 1 else 0
        return size / self.share(3) + again

    def weights(self, model: Model) -> Item:
        """Of the model in the run's precision."""
        lower = "bf16, zero_stage 3" if self.stage < 3 else "bf16, more ranks"
        return Item(f"{model.name}: weights", self.divided(model.bytes), lower)

    def on_its_way(self, name: str, model: Model) -> Item:
        """What a load holds on the host: the whole model, under stage 3 one weight after the other."""
        size = model.bytes if self.stage < 3 else model.widest * model.width
        return Item(name, size, "zero_stage 3, fewer ranks a host", HOST)

    def gathered(self, model: Model) -> list[Item]:
        """What stage 3 has together in a forward or backward pass."""
        if self.stage < 3:
            return []
        at_once = max(model.widest, model.block)
        return [Item("weights gathered by ZeRO-3", min(model.numbers, LIVE + at_once) * model.width)]

    def whole(self, model: Model) -> list[Item]:
        """The model that engine hf puts together for as long as it generates."""
        return [] if self.stage < 3 else [Item("weights gathered to generate", model.bytes, "engine_type vllm")]

    def for_workers(self, model: Model, size: float) -> list[Item]:
        """What rollout workers take weights from. size: bytes of the versions that are kept, by rank of the host."""
        return [Item("versions of the weights for the workers", size, where=HOST), *self.handed_over(model)]

    def read_back(self, model: Model) -> Item:
        """What a rank that resumes has read before it is where it stays: weights, whole below stage 3, and its states,
        at once where another number of ranks saved them. Moments of the host stay where they are read to."""
        weights = model.trained * model.width if self.stage < 3 else 0
        moments = 0 if self.on_cpu or self.config.adam_offload else self._moments(model)
        size = weights + self._masters(model) + moments
        return Item("checkpoint that is read", size, "zero_stage 3, lora_rank, more ranks", HOST)

    def standing_in(self, model: Model, lower: str) -> Item:
        """A copy in fp32 that computes in the weights' place takes their precision for it."""
        size = model.trained * model.width / self.share(3) if model.width < FP32 else 0
        return Item("copy that stands in for the weights", size, lower)

    def handed_over(self, model: Model) -> list[Item]:
        """What stage 3 has together while an engine takes the weights over."""
        if self.stage < 3:
            return []
        size = max(model.widest * model.width, min(BUCKET_BYTES, model.bytes))
        return [Item("weights gathered for the engine", size)]

    def optimizer(self, model: Model, stepped: bool = True) -> list[Item]:
        """fp32 weights and Adam's moments; on the host with adam_offload. stepped: whether the first step is done,
        before which there are no moments."""
        moments = self._moments(model) if stepped else 0
        lower = "adam_offload, offload_trainer, lora_rank, more ranks"
        item = Item(f"{model.name}: fp32 weights and Adam's moments", self._masters(model) + moments, lower)
        return self._offloaded(item, model) if self.config.adam_offload else [item]

    def moments(self, model: Model) -> list[Item]:
        """Adam's moments beside `optimizer` before the first step."""
        item = Item(f"{model.name}: moments that are read", self._moments(model), "adam_offload, lora_rank, more ranks")
        return [item.on_host(self.config.adam_offload)]

    def _masters(self, model: Model) -> float:
        """Bytes of fp32 weights beside those that compute."""
        return FP32 * model.trained / self.share(1) if self.stage or model.width < FP32 else 0

    def _moments(self, model: Model) -> float:
        return 2 * FP32 * model.trained / self.share(1)

    def _offloaded(self, states: Item, model: Model) -> list[Item]:
        """With adam_offload. Gradients in fp32 lie beside the states, and from stage 2 on what is added up: stage 2 has
        memory for each weight's, or adds up on the device. Stages 1 and 2 copy by way of buffers."""
        part = model.trained / self.ranks
        buffer = Item(f"{model.name}: buffer of a gradient", model.largest * model.width)
        if self.stage == 3:
            width = self._added_up(model)
            whole, rest = divmod(part, SUBGROUP)
            more = (FP32 + width) * part
            locked, dealt = [width * part, *[FP32 * SUBGROUP] * int(whole), FP32 * rest], []
        else:
            apart = self.stage == 2 and not self.in_fp32(model)
            more = (FP32 + (1 + apart) * model.width) * part
            locked = [FP32 * part] * 2 + [model.width * part]
            dealt = [model.width * own for own in model.each] if apart else []
        items = [Item(states.name, states.bytes + more, states.lower, HOST)]
        items += [buffer, buffer.on_host()] if self.stage < 3 else []
        if self.on_cpu:
            return items
        return items + rounded(f"{model.name}: fp32 weights and gradients", locked, dealt, self.ranks)

    def saved(self, model: Model) -> list[Item]:
        """A rank's copy of what it writes behind the run, which is kept for the next time; rank 0's of the weights is
        counted over all ranks."""
        share, named = model.trained / self.ranks, f"{model.name}: copy of the checkpoint"
        item = Item(named, (3 * FP32 + model.width) * share, "async_save false, lora_rank, more ranks", HOST)
        return [item, *([] if self.on_cpu else rounded(named, [FP32 * share] * 3))]

    def gradients(self, model: Model, micro_batches: int = 2) -> list[Item]:
        """While backward runs: those reduced so far, those of the present micro-batch, and buckets.

        micro_batches: of an update on this rank; with more than one, gradients are added up. 0: no backward runs.
        """
        held, stays = model.trained * self._added_up(model) / self.share(2), self._sums_stay(model)
        lower = "zero_stage 2, more ranks, lora_rank"
        lower += ", grad_accum_dtype bf16" if stays or (self.config.adam_offload and self.in_fp32(model)) else ""
        if self.stage == 0 or stays:
            beside = model.trained * model.width if stays and micro_batches else 0
            return [Item(f"{model.name}: gradients", held + beside, lower)]
        bucket = min(BUCKET, model.trained) if self.on_cpu else BUCKET  # untouched pages of the host take nothing
        # Stage 3 reduces a copy of its bucket.
        twice = self.config.overlap_comm if self.stage < 3 else micro_batches > 0
        buckets = (bucket + (min(bucket, model.trained) if self.stage == 3 else bucket) * twice) * model.width
        adds_up = micro_batches > 1 and not (self.stage == 3 or self.config.adam_offload or self.in_fp32(model))
        again = model.trained * model.width / self.ranks if adds_up else 0
        where = self.config.adam_offload and self.stage >= 2 and not self.in_fp32(model)
        single = model.largest * model.width if model.largest > BUCKET and micro_batches else 0
        return [
            Item(f"{model.name}: gradients", 0 if where else held + again, lower),
            Item(f"{model.name}: {BUCKETS}", buckets + single, "no overlap_comm" if self.config.overlap_comm else ""),
        ]

    def _added_up(self, model: Model) -> int:
        """Bytes of a number in which gradients of micro-batches are added up."""
        return {"fp32": FP32, "bf16": 2, None: model.width}[self.config.accumulated_in(model.width < FP32)]

    def kept(self, model: Model) -> list[Item]:
        """Of `gradients` what is there between updates too: stage 3 makes room for them once."""
        return self.gradients(model, micro_batches=0) if self.stage == 3 or self._sums_stay(model) else []

    def _sums_stay(self, model: Model) -> bool:
        """Whether each rank keeps whole sums in fp32, from the start on."""
        return self.stage == 1 and self.in_fp32(model) and not self.config.adam_offload

    def in_fp32(self, model: Model) -> bool:
        """Whether stages 1 and 2 add gradients of weights in bf16 up in one fp32 tensor, on the device in any case."""
        added_up = self.config.accumulated_in(model.width < FP32)
        return 0 < self.stage < 3 and model.width < FP32 and added_up == "fp32"

    def gradients_at_once(self, model: Model) -> bool:
        """Whether gradients are one tensor that is there before a backward, as stage 3's, or comes with its first."""
        return self.in_fp32(model) or (self.stage == 3 and not self.config.adam_offload)

    def step(self, model: Model) -> list[Item]:
        """While the optimizer steps: gradients in fp32, on the CPU also AdamW's temporaries. Stages 1 and 2 make a flat
        copy of gradients in another type, and one in fp32; the last alone is there while AdamW works."""
        part, kept, own = model.trained / self.share(1), self.kept(model), model.trained * model.width
        if self.config.adam_offload:
            updated = part * model.width if model.width < FP32 else 0
            return [*kept, Item(f"{model.name}: updated weights", updated, where=HOST)]
        temporaries = 2 * self.on_cpu
        if self.stage == 3:
            size = FP32 * min(SUBGROUP, part) * (1 + temporaries)
        elif self.stage == 0:
            size = FP32 * (part + temporaries * model.largest) + (own if model.width < FP32 else 0)
        elif kept:
            size = FP32 * part * temporaries + own
        else:
            size = FP32 * part * (1 + (temporaries or not self.in_fp32(model)))
        return [*kept, Item(f"{model.name}: gradients in fp32", size, "more ranks, lora_rank")]
