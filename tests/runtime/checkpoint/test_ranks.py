"""An optimizer on another number of ranks: parts of odd sizes, sub-groups, and a file that is missing."""

import pytest
import torch

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.checkpoint.ranks import files_of_ranks, part_of, share, sub_groups


@pytest.mark.parametrize(("saved", "ranks"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize(("numel", "multiple"), [(1, 1), (5, 1), (12, 1), (59, 1), (59, 2)])
def test_parts_on_other_ranks_are_the_whole_with_a_padding_of_their_own(saved, ranks, numel, multiple):
    """ZeRO-3 pads a parameter to the ranks, ZeRO 1 and 2 a group to a multiple of them."""
    whole = torch.arange(1.0, numel + 1)
    old, new = (share(numel, multiple * count) * multiple for count in (saved, ranks))
    pieces = [part_of([whole], numel, old, rank) for rank in range(saved)]
    parts = [part_of(pieces, numel, new, rank) for rank in range(ranks)]
    assert all(len(part) == new for part in parts)
    assert torch.equal(torch.cat(parts)[:numel], whole) and not torch.cat(parts)[numel:].any()


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
