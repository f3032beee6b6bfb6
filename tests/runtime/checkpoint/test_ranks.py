"""An optimizer on another number of ranks: parts of odd sizes, sub-groups, and a file that is missing."""

from types import SimpleNamespace

import pytest
import torch

from lightrft_visual.errors import CheckpointError
from lightrft_visual.runtime.checkpoint.ranks import files_of_ranks, part_of, share, stage_3, stages_1_and_2, sub_groups


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
    assert len(files_of_ranks(tmp_path, 1)) == 1
    with pytest.raises(CheckpointError, match="no optim_states of rank 1, though 2 rank"):
        files_of_ranks(tmp_path, 2)


STATE = {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(1.0, 4.0)}}


def zero_2(one, saved, parameter):
    file = {"base_optimizer_state": one, "single_partition_of_fp32_groups": [saved]}
    zero = SimpleNamespace(
        single_partition_of_fp32_groups=[parameter], optimizer=torch.optim.AdamW([parameter]),
        round_robin_bit16_groups=[[torch.zeros(3)]], round_robin_bit16_padding=[[0]],
    )  # fmt: skip
    found = stages_1_and_2([file], zero, 0)
    return found["single_partition_of_fp32_groups"][0], found["base_optimizer_state"]["state"]


def zero_3(one, saved, parameter):
    zero = SimpleNamespace(
        optimizer=torch.optim.AdamW([parameter]), fp16_groups=[[SimpleNamespace(ds_numel=3)]],
        sub_group_to_group_id={0: 0}, sub_group_size=100, partition_count=2,
        _set_fp32_optimizer_param_groups=lambda: None, _clear_fp32_optimizer_param_groups=lambda: None,
    )  # fmt: skip
    found = stage_3([{"optimizer_state_dict": one, "fp32_flat_groups": [saved]}], zero, 0, 2)
    return found["fp32_flat_groups"][0], found["optimizer_state_dict"]["state"]


@pytest.mark.parametrize("stage", [zero_2, zero_3])
@pytest.mark.parametrize("state", [{}, STATE])
def test_moments_of_an_optimizer_that_has_not_stepped_are_left_out(stage, state):
    """Such as that of an actor that a critic goes ahead of."""
    one = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    master, moments = stage(one, torch.arange(1.0, 4.0), torch.nn.Parameter(torch.zeros(2)))
    assert master.tolist() == [1, 2]
    assert {number: each["exp_avg"].tolist() for number, each in moments.items()} == ({0: [1, 2]} if state else {})
