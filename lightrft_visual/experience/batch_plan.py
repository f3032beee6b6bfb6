"""The order of training over one replay buffer: optimizer steps, and in each step the micro-batches of every rank.

Pure functions of what all ranks know (ids and lengths of all samples, and a seed), so every rank computes the same
plan and takes its own part: no rank waits for a micro-batch that another one does not have.
"""

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch

from ..errors import ConfigError, DataError

BALANCED = 0.01  # difference of ranks, as a part of their load, that is not worth a transfer


@dataclass(frozen=True)
class SampleRef:
    """One sample as all ranks see it. key: sample_id, or None; tokens: its length S.

    group: of samples whose prompt of `prompt` tokens is computed once for all of them in a micro-batch; None for a
    sample that shares nothing. Such groups stay together where they can.
    together: of samples that come into one step where they fit, also if they share nothing; default: group.
    media: see `VisionTensors.media`.
    """

    rank: int
    index: int  # in its rank's buffer
    tokens: int
    key: int | None = None
    group: int | None = None
    prompt: int = 0
    together: int | None = None
    media: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MicroBatch:
    """Items of one forward and backward. filler: nothing is left for this rank, so the items are repeated with
    `valid` false and count for nothing. media: those of all ranks' micro-batches of this number; None: not known."""

    indices: list[int]
    filler: bool = False
    media: frozenset[str] | None = None


def have_keys(samples: Sequence[SampleRef]) -> bool:
    """Whether every sample has a key that no other has."""
    keys = {sample.key for sample in samples}
    return None not in keys and len(keys) == len(samples)


def shuffled_steps(samples: Sequence[SampleRef], step_size: int | None, seed: int) -> list[list[SampleRef]]:
    """Samples of each optimizer step, all ranks together; the last step may be smaller.

    The order is a permutation of the samples, or of those that belong together, sorted by key. So with keys on all
    samples the steps do not depend on the number of ranks.

    Args:
        samples: of all ranks, in the same order on each of them.
        step_size: samples of a step over all ranks, at least 1, else ConfigError; None: one step of all samples.
        seed: of the permutation; another one for each epoch.
    """
    if step_size is not None and step_size < 1:
        raise ConfigError(f"the samples of a step must be at least 1, not {step_size}")
    if have_keys(samples):
        samples = sorted(samples, key=attrgetter("key"))
    generator, groups = torch.Generator().manual_seed(seed), _grouped(samples, _belongs(samples))
    order = [each for index in torch.randperm(len(groups), generator=generator).tolist() for each in groups[index]]
    size = step_size or len(order)
    return [order[start : start + size] for start in range(0, len(order), size)]


def moves_between_ranks(step: Sequence[SampleRef], ranks: int, by_tokens: bool) -> list[tuple[SampleRef, int]]:
    """(sample, new rank) of the few samples to move, so that all ranks hold nearly equal shares of one step.

    Each move takes from the fullest rank to the emptiest the samples that come nearest to halving their gap, until the
    gap is at most BALANCED of a share or none narrow it. First move all samples of a rank that belong together, which
    mostly share patches, then what remains, one by one. Samples that share a prompt's computation move together also
    then; they are parted only where the ranks still lie further apart than the prompt's second computation costs.

    Args:
        step: samples of one optimizer step, of all ranks.
        ranks: how many there are; a group of ranks that hold the same samples is one.
        by_tokens: whether shares count computed tokens, as they always do where samples share prompts; else samples.
    """
    grouped = any(sample.group is not None for sample in step)
    cost = computed_tokens if by_tokens or grouped else len
    own = _by_rank(step, ranks)
    own = _even([_grouped(each, _belongs(each)) for each in own], cost, parted=False)
    own = _even([_grouped(each) for each in own], cost, parted=grouped)
    return [(sample, rank) for rank, each in enumerate(own) for sample in each if sample.rank != rank]


def _even(groups: list[list[list[SampleRef]]], cost: Callable[..., int], parted: bool) -> list[list[SampleRef]]:
    """Samples of each rank after moves (see `moves_between_ranks`); none moves twice.

    Args:
        groups: of each rank, of samples that move together.
        cost: of samples.
        parted: whether a group may be parted.
    """
    groups = [sorted(each, key=cost) for each in groups]
    sizes = [[cost(group) for group in each] for each in groups]
    loads = [sum(each) for each in sizes]
    arrived: list[list[SampleRef]] = [[] for _ in groups]
    while max(loads) - min(loads) > BALANCED * sum(loads) / len(loads):
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[full] - loads[empty]
        position = _nearest(sizes[full], gap / 2)
        if position is None:
            break
        group, size = groups[full][position], sizes[full][position]
        staying = group[: _staying(group, gap)] if parted and size >= gap else []
        if size >= gap and not staying:
            break
        del groups[full][position], sizes[full][position]
        if staying:  # the smallest: any smaller group would have come nearer than the one that is parted
            groups[full].insert(0, staying)
            sizes[full].insert(0, cost(staying))
        moved = group[len(staying) :]
        arrived[empty] += moved
        loads[full] -= size - cost(staying)
        loads[empty] += cost(moved)
    return [[*chain(*each), *more] for each, more in zip(groups, arrived)]


def _staying(group: list[SampleRef], gap: float) -> int:
    """How many samples of a group stay when the others leave, as many as narrow the gap most; 0 if it would widen."""
    count = len(group)
    while count > 1 and 2 * computed_tokens(group[count - 1 :]) - group[0].prompt <= gap:
        count -= 1
    return count if count < len(group) else 0


def _nearest(numbers: list[int], target: float) -> int | None:
    """Index of the number closest to `target` in a sorted list; None in an empty one."""
    position = bisect.bisect_left(numbers, target)
    around = [index for index in (position - 1, position) if 0 <= index < len(numbers)]
    return min(around, key=lambda index: abs(numbers[index] - target), default=None)


def micro_batches(
    step: Sequence[SampleRef], ranks: int, micro_batch_size: int, token_budget: int | None = None
) -> list[list[list[SampleRef]]]:
    """Each rank's micro-batches of one step: by tokens where there is a budget of them, else by samples, with sizes
    that differ by one sample at most.

    All ranks get as many as the fullest rank needs; some are empty where a rank has too few samples.

    Args:
        step: samples of one optimizer step, of all ranks.
        ranks: how many there are; a group of ranks that hold the same samples is one.
        micro_batch_size: most samples of a micro-batch, not read where there is a token budget. Where samples share
            prompts it takes more of them, up to the tokens of so many samples that share nothing.
        token_budget: of a micro-batch, see `plan_by_tokens`; None for none.
    """
    if token_budget is None and any(sample.group is not None for sample in step):
        token_budget = micro_batch_size * max(sample.tokens for sample in step)
    if token_budget is not None:
        return plan_by_tokens(step, ranks, token_budget)
    own = _by_rank(step, ranks)
    count = max(-(-len(each) // micro_batch_size) for each in own)
    cuts = [[len(each) * index // count for index in range(count + 1)] for each in own]
    return [[each[start:stop] for start, stop in zip(at, at[1:])] for each, at in zip(own, cuts)]


def most_tokens(samples: Sequence[SampleRef], micro_batch_size: int, token_budget: int | None = None) -> int:
    """Tokens that `micro_batches` puts into one micro-batch at most.

    Args:
        samples: those of a rank, or others of which its own are no longer.
        micro_batch_size, token_budget: as of `micro_batches`.
    """
    return min(computed_tokens(samples), token_budget or micro_batch_size * max(sample.tokens for sample in samples))


def plan_by_tokens(step: Sequence[SampleRef], ranks: int, budget: int) -> list[list[list[SampleRef]]]:
    """Micro-batches of each rank, as few as the samples fit in, the same number on all ranks.

    Best fit decreasing finds how many are needed; the samples are then dealt longest first to the emptiest of them,
    which makes them equally full, and sorted fullest first, so that ranks that meet at each micro-batch wait little.
    Samples that share a prompt, which counts once, stay together; a group above the budget is cut into several.

    Args:
        step: samples of one optimizer step, of all ranks.
        ranks: how many there are.
        budget: most computed tokens of a micro-batch; DataError on a sample that is longer.
    """
    for sample in step:
        if sample.tokens > budget:
            raise DataError(
                f"sample {sample.index} of rank {sample.rank} has {sample.tokens} tokens, "
                f"more than the budget of {budget} tokens for a micro-batch"
            )
    own = [[part for group in _grouped(each) for part in _cut(group, budget)] for each in _by_rank(step, ranks)]
    needed = [_best_fit(each, budget) for each in own]
    count = max(len(bins) for bins in needed)
    plans = []
    for each, bins in zip(own, needed):
        dealt = _deal(each, count)
        fits = all(computed_tokens(list(chain(*bin_))) <= budget for bin_ in dealt)
        filled = [list(chain(*bin_)) for bin_ in (dealt if fits else _widen(bins, count))]
        plans.append(sorted(filled, key=computed_tokens, reverse=True))
    return plans


def own_micro_batches(plan: list[list[list[SampleRef]]], own: int, samples: Sequence[SampleRef]) -> list[MicroBatch]:
    """One rank's part of a step as indices into its buffer; in place of an empty micro-batch, its first item as filler.

    Args:
        plan: of `micro_batches`.
        own: the rank.
        samples: all that the ranks hold.
    """
    first, made = {sample.rank: [sample] for sample in samples if sample.index == 0}, []
    for batches in zip(*plan, strict=True):
        run = [batch or first[rank] for rank, batch in enumerate(batches)]
        media = frozenset(name for batch in run for sample in batch for name in sample.media)
        made.append(MicroBatch([sample.index for sample in run[own]], filler=not batches[own], media=media))
    return made


def computed_tokens(batch: Sequence[SampleRef]) -> int:
    """That are computed: a shared prompt once."""
    shared = {sample.group: sample.prompt for sample in batch if sample.group is not None}
    return sum(each.tokens - (each.prompt if each.group is not None else 0) for each in batch) + sum(shared.values())


def _belongs(samples: Sequence[SampleRef]) -> list[int | None]:
    """The group of samples that each belongs to."""
    return [sample.group if sample.together is None else sample.together for sample in samples]


def _grouped(samples: Sequence[SampleRef], groups: Sequence[int | None] | None = None) -> list[list[SampleRef]]:
    """Samples of a group together, others alone, in the order of their first ones; default: that share a prompt."""
    groups = [sample.group for sample in samples] if groups is None else groups
    found: dict[int, list[SampleRef]] = {}
    for position, (sample, group) in enumerate(zip(samples, groups)):
        found.setdefault(-1 - position if group is None else group, []).append(sample)
    return list(found.values())


def _cut(group: list[SampleRef], budget: int) -> list[list[SampleRef]]:
    """As few parts of nearly equal length as fit into the budget."""
    count = 1
    while True:
        parts = [list(chain(*part)) for part in _deal([[sample] for sample in group], count)]
        if all(computed_tokens(part) <= budget for part in parts):
            return parts
        count += 1


def _by_rank(step: Sequence[SampleRef], ranks: int) -> list[list[SampleRef]]:
    own: list[list[SampleRef]] = [[] for _ in range(ranks)]
    for sample in step:
        own[sample.rank].append(sample)
    return own


def _best_fit(groups: list[list[SampleRef]], budget: int) -> list[list[list[SampleRef]]]:
    """Bins of at most `budget` tokens: longest group first, each into the fullest bin that still has room for it."""
    bins: list[list[list[SampleRef]]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for group in sorted(groups, key=computed_tokens, reverse=True):
        position = bisect.bisect_left(room, (computed_tokens(group), -1))
        left, target = room.pop(position) if position < len(room) else (budget, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(group)
        bisect.insort(room, (left - computed_tokens(group), target))
    return bins


def _deal(groups: list[list[SampleRef]], count: int) -> list[list[list[SampleRef]]]:
    """`count` bins of nearly equal load: longest group first, each into the emptiest bin."""
    bins: list[list[list[SampleRef]]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for group in sorted(groups, key=computed_tokens, reverse=True):
        load, target = loads[0]
        bins[target].append(group)
        heapq.heapreplace(loads, (load + computed_tokens(group), target))
    return bins


def _widen(bins: list[list[list[SampleRef]]], count: int) -> list[list[list[SampleRef]]]:
    """`count` bins out of fewer, which hold `count` groups or more: the fullest that can be halved is, each time."""
    bins = [list(each) for each in bins]
    while len(bins) < count:
        splittable = [each for each in bins if len(each) > 1]
        largest = max(splittable, key=lambda each: computed_tokens(list(chain(*each))))
        bins.append([largest.pop() for _ in range(len(largest) // 2)])
    return bins
