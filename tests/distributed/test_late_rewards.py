"""Remote rewards come beside the forward passes; when they come changes nothing, on one rank and on two."""

from __future__ import annotations

import pytest
from plans import LATE_STEPS
from test_rank_count import largest_difference
from whole_runs import rows, weights


def test_replies_decide_nothing_by_when_they_come(one_rank):
    late, now = one_rank / "late", one_rank / "late_now"
    assert rows(late) == rows(now) and len(rows(late)) == LATE_STEPS
    assert weights(late) == weights(now)
    assert all(row["grad_norm"] > 0.01 and row["skipped_steps"] == 0 for row in rows(late))


@pytest.mark.parametrize("ours, theirs", [("late", "late_3"), ("late_some", "late_some_2")])
def test_two_ranks_wait_for_replies_and_train_like_one(one_rank, two_ranks, ours, theirs):
    assert largest_difference(rows(one_rank / ours), rows(two_ranks / theirs)) < 1e-4


def test_a_reward_that_is_missing_leaves_its_tokens_out(one_rank):
    found = rows(one_rank / "late_some")
    assert found[0]["reward/invalid_share"] > 0
    assert all(row["skipped_steps"] == 0 and row["grad_norm"] > 0.01 for row in found)
