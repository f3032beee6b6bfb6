"""A whole run gives the same metrics on one rank and two, for every ZeRO stage and kind of batch.

Tokens are given: drawn ones would follow what each form of a run rounds otherwise.
"""

import pytest
from plans import LIKE_ONE, MIXED_STEPS
from whole_runs import rows, weights

NAMES = ("loss", "reward_mean", "reward_std", "grad_norm", "kl", "entropy", "response_length", "tokens", "clip_frac")


def largest_difference(left: list[dict], right: list[dict], names=NAMES) -> float:
    """Of metrics below 1 the difference, of larger ones the share that they differ by."""
    pairs = [(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in names]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


@pytest.mark.parametrize("name", LIKE_ONE)
def test_two_ranks_train_and_evaluate_like_one(one_rank, two_ranks, name):
    ours, theirs = rows(one_rank / "given"), rows(two_ranks / name)
    assert len(ours) == 2
    assert largest_difference(ours, theirs) < 1e-4
    assert ours[1]["loss"] != 0 and ours[1]["grad_norm"] > 0.1
    ours, theirs = (rows(each, "eval_metrics.csv") for each in (one_rank / "given", two_ranks / name))
    assert [row.keys() for row in ours] == [row.keys() for row in theirs] and len(ours) == 2
    assert largest_difference(ours, theirs, ours[0].keys()) < 1e-5


def test_old_log_probs_of_the_training_forward_are_those_of_a_pass_of_their_own(one_rank):
    ours, theirs = one_rank / "updates", one_rank / "updates_separate"
    assert rows(ours) == rows(theirs) and weights(ours) == weights(theirs)
    assert all(row["ratio_max_dev_first"] == 0 for row in rows(ours))
    assert any(row["ratio_max_dev"] > 0 for row in rows(ours))


def test_nothing_is_trained_on_a_rollout_of_stale_weights(one_rank):
    """The first update never reached the engine, and no probe was made after it: the second rollout shows it."""
    trace = (one_rank / "stale" / "failed.txt").read_text()
    assert "what was sampled is not what would be trained. Likely cause: stale weight" in trace
    assert "self.actor.step()" not in trace
    with open(one_rank / "stale" / "metrics.csv", encoding="utf-8") as file:
        assert len(file.readlines()) == 2  # the columns, and the first step


def test_an_engine_in_eight_bits_trains_with_its_drift_shown_and_weighed(one_rank):
    """The embedded model as float8 draws: the gate lets the drift pass, and the loss weighs it."""
    (row,) = rows(one_rank / "eight_bits")
    assert 1e-3 < row["rollout_logp_diff"] < 0.3 and row["rollout_logp_diff_max"] > row["rollout_logp_diff"]
    assert row["tis_weight"] != 1 and 0.8 < row["tis_weight"] < 1.2 and row["loss"] == row["loss"]


@pytest.mark.parametrize("name", ["packed", "budget"])
def test_a_prompt_computed_once_trains_like_its_copies(one_rank, name):
    """Prompts are shared in `given` and, packed within a budget of tokens, in `budget`."""
    first = largest_difference(rows(one_rank / "given")[:1], rows(one_rank / name)[:1], ("loss", "grad_norm"))
    assert first < 1e-5
    assert largest_difference(rows(one_rank / "given"), rows(one_rank / name)) < 1e-4


def test_the_first_update_starts_at_ratio_one(one_rank, two_ranks):
    folders = [one_rank / name for name in ("base", "given", "packed", "budget", "grpo_2")]
    folders += [two_ranks / name for name in (*LIKE_ONE, "ppo_3")]
    for folder in folders:
        assert all(row["ratio_max_dev_first"] <= 1e-4 for row in rows(folder)), folder
    replayed = rows(one_rank / "grpo_2")[1:]  # samples of earlier policies are trained on again
    assert max(row["ratio_max_dev"] for row in replayed) > 1e-2


def test_a_rank_without_images_does_not_hang_zero_3(two_ranks):
    found = rows(two_ranks / "mixed")
    assert len(found) == MIXED_STEPS
    assert all(row["parity"] <= 1e-5 and row["rollout_logp_diff_max"] <= 1e-4 for row in found)


def test_two_ranks_wait_for_late_replies_and_train_like_one_without_tokens_whose_reward_is_missing(one_rank, two_ranks):
    assert largest_difference(rows(one_rank / "late"), rows(two_ranks / "late_2")) < 1e-4
    (row,) = rows(one_rank / "late")
    assert row["reward/invalid_share"] > 0 and row["skipped_steps"] == 0 and row["grad_norm"] > 0.01
