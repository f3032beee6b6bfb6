"""Ranks that hold one sequence together, and what they exchange (Ulysses, arXiv 2309.14509).

Ranks beside each other form a group. In training its members get the same micro-batches, each computes its slice of the
tokens, and attention exchanges slices of tokens for slices of heads (`models/attention.py`). Each member's backward
pass gives the gradients of its own slice; since losses are shares that add up over all ranks, their sum is what one
rank would have, and DeepSpeed needs to know nothing of the groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from ..errors import ConfigError
from . import collectives

T = torch.Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """This rank's group. size: its members; index: this rank among them; tensors, objects: the process groups."""

    size: int
    index: int
    tensors: dist.ProcessGroup
    objects: dist.ProcessGroup

    @classmethod
    def of(cls, size: int) -> Self | None:
        """The group of `size` ranks beside each other that this rank is in; None for 1. A collective of all ranks.

        Raises ConfigError where the ranks do not divide into such groups.
        """
        if size == 1:
            return None
        world = collectives.world_size()
        if world % size:
            raise ConfigError(f"sp_size {size} does not divide {world} ranks: start a multiple of {size}")
        tensors, objects = collectives.neighbours(size, tensors=True), collectives.neighbours(size)
        return cls(size, collectives.rank() % size, tensors, objects)

    @property
    def leads(self) -> bool:
        """Whether this rank is the one of its group that counts what all members have alike."""
        return self.index == 0

    def slice_of(self, length: int) -> slice:
        """This rank's part of `length` tokens, which `size` divides."""
        own = length // self.size
        return slice(self.index * own, (self.index + 1) * own)

    def joined(self, part: T, indices: T, count: int) -> T:
        """(count, ...): the parts of all members as a whole.

        What each member computes of the whole is the same on all of them and counts once: the gradient of a part is
        that of its places, without a sum over the members.

        Args:
            part: (n, ...), this member's.
            indices: (n) long, where the part's entries stand in the whole.
            count: length of the whole.
        """
        return _Joined.apply(part, indices, count, self.tensors)

    def shared(self, blocks: T, sizes: list[int]) -> T:
        """(sum of sizes, ...): the members' tensors (sizes[member], ...) in their order.

        Each member goes on with the whole in another way: the gradient of a tensor is the sum over the members.
        """
        return _Shared.apply(blocks, sizes, self.index, self.tensors)

    def together(self, score: Callable[..., Any], inputs: Any, *args: Any, **settings: Any) -> Any:
        """score(inputs, ...) for members that each have inputs of their own: all run those of each in turn.

        Every member calls it equally often. inputs: with `to(device)`, as `ModelInputs`. Without gradient.
        """
        device, own = inputs.sequences.device, None
        for index, each in enumerate(collectives.all_gather_object(inputs.to("cpu"), self.objects)):
            scores = score(each.to(device), *args, **settings)
            own = scores if index == self.index else own
        return own


def own_scores(score: Callable[..., Any], group: SequenceGroup | None) -> Callable[..., Any]:
    """score for members with inputs of their own, see `SequenceGroup.together`; without a group score itself."""
    return score if group is None else partial(group.together, score)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: T, indices: T, count: int, group: dist.ProcessGroup) -> T:
        ctx.save_for_backward(indices)
        whole = part.new_zeros(count, *part.shape[1:])
        whole[indices] = part
        return collectives.all_reduce_sum(whole, group)

    @staticmethod
    def backward(ctx, gradient: T) -> tuple[T | None, ...]:
        return gradient[ctx.saved_tensors[0]], None, None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, blocks: T, sizes: list[int], index: int, group: dist.ProcessGroup) -> T:
        ctx.sizes, ctx.index, ctx.group = sizes, index, group
        return torch.cat(collectives.gather_in_group(blocks, sizes, group))

    @staticmethod
    def backward(ctx, gradient: T) -> tuple[T | None, ...]:
        whole = collectives.all_reduce_sum(gradient.contiguous(), ctx.group)
        return whole.split(ctx.sizes)[ctx.index], None, None, None
