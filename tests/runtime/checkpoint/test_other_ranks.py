"""Flat pieces of one number of ranks as those of another, without DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.checkpoint.ranks import (
    files_of_ranks,
    part_of_group,
    part_of_parameter,
    share,
    sub_groups,
)


@pytest.mark.parametrize(("saved", "ranks"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize("numel", [1, 5, 12, 59])
def test_parts_of_a_parameter_on_other_ranks_are_the_parameter(saved, ranks, numel):
    whole = torch.arange(1.0, numel + 1)
    pieces = [part_of_parameter([whole], numel, saved, rank) for rank in range(saved)]
    parts = [part_of_parameter(pieces, numel, ranks, rank) for rank in range(ranks)]
    assert all(part.numel() == share(numel, ranks) for part in parts)
    assert torch.equal(torch.cat(parts)[:numel], whole) and not torch.cat(parts)[numel:].any()


@pytest.mark.parametrize(("saved", "ranks"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_parts_of_a_group_on_other_ranks_are_the_group_with_its_own_padding(saved, ranks):
    whole, old, new = torch.arange(1.0, 60), -(-60 // (2 * saved)) * 2, -(-60 // (2 * ranks)) * 2
    pieces = [part_of_group([whole], 59, old, rank) for rank in range(saved)]
    parts = torch.cat([part_of_group(pieces, 59, new, rank) for rank in range(ranks)])
    assert torch.equal(parts[:59], whole) and not parts[59:].any()


@pytest.mark.parametrize(
    ("groups", "ranks", "largest", "expected"),
    [
        ([[4, 4, 4], [2]], 1, 100, [[4, 4, 4], [2]]),
        ([[4, 4, 4], [2]], 1, 8, [[4, 4], [4], [2]]),
        ([[4, 4, 4], [2]], 2, 8, [[4, 4, 4], [2]]),
    ],
)
def test_sub_groups_follow_what_a_rank_holds(groups, ranks, largest, expected):
    assert sub_groups(groups, ranks, largest) == expected


def test_a_missing_rank_is_named(tmp_path):
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert len(files_of_ranks(tmp_path, 1, "optim_states")) == 1
    with pytest.raises(CheckpointError, match="no optim_states of rank 1, though 2 rank"):
        files_of_ranks(tmp_path, 2, "optim_states")
