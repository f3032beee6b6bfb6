"""What DeepSpeed's optimizer saved on some number of ranks, as this rank's part on another number.

ZeRO 1 and 2 lay the parameters of a group behind each other and divide that line over the ranks; ZeRO-3 divides each
parameter. A rank reads the files of all, as maps of memory, and copies only what it holds from now on: nothing is
written, and no rank ever has the whole.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError

T = torch.Tensor
States = dict[int, dict[str, Any]]  # of an optimizer, by the number of the tensor that it steps


def files_of_ranks(folder: Path, ranks: int) -> list[Path]:
    """DeepSpeed's file of each rank's optimizer in the folder of an engine that so many ranks saved. CheckpointError
    where one is missing."""
    found = []
    for rank in range(ranks):
        named = sorted(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        if not named:
            raise CheckpointError(f"{folder} has no optim_states of rank {rank}, though {ranks} rank(s) saved it")
        found.append(named[0])
    return found


def part_of(pieces: Sequence[T], total: int, size: int, rank: int) -> T:
    """This rank's part (size) of flat pieces that lie behind each other.

    Args:
        pieces: (n) each, of the ranks that saved, in their order; the last ones may end in padding.
        total: elements of all pieces without that padding.
        size: elements of a rank's part, its padding included.
        rank: whose part is wanted.
    """
    start, stop = rank * size, min((rank + 1) * size, total)
    result, at = torch.zeros(size, dtype=pieces[0].dtype), 0
    for piece in pieces:
        first, last = max(start, at), min(stop, at + piece.numel())
        if first < last:
            result[first - start : last - start] = piece[first - at : last - at]
        at += piece.numel()
    return result


def share(numel: int, ranks: int) -> int:
    """Elements that ZeRO-3 leaves each rank of a parameter, padding included."""
    return -(-numel // ranks)


def sub_groups(groups: Sequence[Sequence[int]], ranks: int, largest: int) -> list[list[int]]:
    """ZeRO-3's sub-groups, as it makes them: sizes of parameters in the order of its groups.

    Args:
        groups: elements of each parameter, by the optimizer's groups.
        ranks: that share each parameter.
        largest: elements of a rank at which a sub-group is full (`sub_group_size`).
    """
    found: list[list[int]] = []
    for group in groups:
        held, current = 0, []
        for numel in group:
            current.append(numel)
            held += share(numel, ranks)
            if held >= largest and sum(share(each, ranks) for each in group) > largest:
                found.append(current)
                held, current = 0, []
        if current:
            found.append(current)
    return found


def _redivided(saved: Mapping[str, Any], divide: Callable[[str], T]) -> dict[str, Any]:
    """The state of one tensor as this rank's: what is divided anew, by name, and numbers, such as the step."""
    return {n: divide(n) if torch.is_tensor(value) and value.dim() else value for n, value in saved.items()}


def _optimizer(saved: Sequence[Mapping[str, Any]], states: States, here: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict: the saved settings of its groups, for the tensors that the groups have here."""
    groups = zip(saved[0]["param_groups"], here["param_groups"], strict=True)
    return {"state": states, "param_groups": [old | {"params": new["params"]} for old, new in groups]}


def masters_of(zero: Any) -> list[T]:
    """This rank's fp32 weights, of each group, under ZeRO 1 and 2. ZeRO 1 that adds gradients up in fp32 is another
    optimizer of DeepSpeed."""
    return zero.fp32_groups_flat_partition if hasattr(zero, "bf16_groups") else zero.single_partition_of_fp32_groups


def _numel(zero: Any, number: int) -> int:
    """Elements of a group's weights, with what lies between them."""
    if hasattr(zero, "bf16_groups"):
        return sum(parameter.numel() for parameter in zero.bf16_groups[number])
    padded = zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_padding[number], strict=True)
    return sum(parameter.numel() + padding for parameter, padding in padded)


def stages_1_and_2(saved: Sequence[Mapping[str, Any]], zero: Any, rank: int) -> dict[str, Any]:
    """What `zero.load_state_dict` takes.

    Args:
        saved: `optimizer_state_dict` of each saved rank's file.
        zero: DeepSpeed's optimizer of this run.
        rank: this one.
    """
    base, masters, states = [each["base_optimizer_state"] for each in saved], [], {}
    for number, master in enumerate(masters_of(zero)):

        def divide(pieces: list[T], total: int = _numel(zero, number), size: int = master.numel()) -> T:
            return part_of(pieces, total, size, rank)

        masters.append(divide([each["single_partition_of_fp32_groups"][number] for each in saved]))
        old = [each["state"][number] for each in base if number in each["state"]]
        if old:  # else it has not stepped yet, as of an actor that its critic goes ahead of
            states[number] = _redivided(old[0], lambda name: divide([each[name] for each in old]))  # noqa: B023
    here = _optimizer(base, states, zero.optimizer.state_dict())
    return dict(saved[0]) | {"base_optimizer_state": here, "single_partition_of_fp32_groups": masters}


def stage_3(saved: Sequence[Mapping[str, Any]], zero: Any, rank: int, ranks: int) -> dict[str, Any]:
    """The same for ZeRO-3, whose sub-groups may be others where the ranks are.

    Args:
        saved, zero, rank: as of `stages_1_and_2`.
        ranks: how many this run has.
    """
    base = [each["optimizer_state_dict"] for each in saved]
    zero._set_fp32_optimizer_param_groups()
    empty = zero.optimizer.state_dict()
    zero._clear_fp32_optimizer_param_groups()
    groups: dict[int, list[int]] = {}
    for number, group in enumerate(zero.fp16_groups):
        groups.setdefault(zero.sub_group_to_group_id[number], []).extend(each.ds_numel for each in group)
    where: list[tuple[int, int, int]] = []  # of each parameter: sub-group, where it begins in a rank's, elements
    for number, sizes in enumerate(sub_groups(list(groups.values()), len(saved), zero.sub_group_size)):
        offsets = accumulate((share(numel, len(saved)) for numel in sizes), initial=0)
        where += [(number, offset, numel) for offset, numel in zip(offsets, sizes)]
    masters, states = [], {}
    for number, group in enumerate(zero.fp16_groups):
        mine, where = where[: len(group)], where[len(group) :]

        def divide(read: Callable[[Mapping[str, Any], int], T], mine: list = mine) -> T:
            parts = []
            for old, offset, numel in mine:
                stop = offset + share(numel, len(saved))
                pieces = [read(each, old)[offset:stop] for each in saved]
                parts.append(part_of(pieces, numel, share(numel, ranks), rank))
            return torch.cat(parts)

        masters.append(divide(lambda each, old: each["fp32_flat_groups"][old]))
        if saved_state := base[0]["state"].get(mine[0][0]):
            states[number] = _redivided(
                saved_state,
                lambda name: divide(lambda each, old: each["optimizer_state_dict"]["state"][old][name]),  # noqa: B023
            )
    content = {"optimizer_state_dict": _optimizer(base, states, empty), "fp32_flat_groups": masters}
    return dict(saved[0]) | content | {"partition_count": zero.partition_count}
