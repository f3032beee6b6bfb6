"""What is trained while rewards are under way is what would be trained after all of them."""

from __future__ import annotations

import pytest
from plans import LATE_STEPS
from test_rank_count import largest_difference
from whole_runs import rows, weights


def test_replies_decide_nothing_by_when_they_come(one_rank):
    late, now = one_rank / "late", one_rank / "late_now"
    assert rows(late) == rows(now) and len(rows(late)) == LATE_STEPS
    assert weights(late) == weights(now)
    assert all(row["trained_while_scoring"] >= 0.75 for row in rows(late))  # all micro-batches but the last one
    assert all(row["grad_norm"] > 0.01 and row["skipped_steps"] == 0 for row in rows(late))


@pytest.mark.parametrize("name", ["late", "late_some"])
def test_an_update_that_was_begun_early_is_the_one_that_waits(one_rank, name):
    early, waited = rows(one_rank / name), rows(one_rank / f"{name}_waited")
    assert largest_difference(early, waited) < 1e-5
    assert not any("trained_while_scoring" in row for row in waited)


def test_gradients_of_an_update_that_turns_out_otherwise_are_gone(one_rank):
    """A reward that is missing leaves its tokens out of every denominator."""
    found = rows(one_rank / "late_some")
    assert found[0]["reward/invalid_share"] > 0 and found[0]["discarded_while_scoring"] > 0
    assert "discarded_while_scoring" not in found[1]  # the next step waits for all rewards
    assert not any(row.get("trained_while_scoring") for row in found)
    assert all(row["skipped_steps"] == 0 and row["grad_norm"] > 0.01 for row in found)


def test_packed_rows_another_loss_and_a_penalty_of_the_kl_begin_early_too(one_rank):
    assert all(row["trained_while_scoring"] >= 0.5 for row in rows(one_rank / "late_packed"))


def test_advantages_of_the_whole_batch_wait_for_it(one_rank):
    assert not any("trained_while_scoring" in row for row in rows(one_rank / "late_whole"))


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_begin_together(one_rank, two_ranks, stage):
    ours, theirs = rows(one_rank / "late"), rows(two_ranks / f"late_{stage}")
    assert largest_difference(ours, theirs) < 1e-4
    assert all(row["trained_while_scoring"] >= 0.5 for row in theirs)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_discard_together(one_rank, two_ranks, stage):
    ours, theirs = rows(one_rank / "late_some"), rows(two_ranks / f"late_some_{stage}")
    assert largest_difference(ours, theirs) < 1e-4
    assert theirs[0]["discarded_while_scoring"] > 0 and "discarded_while_scoring" not in theirs[1]
