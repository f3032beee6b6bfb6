"""A run whose ranks generate for each other is the run without."""

from __future__ import annotations

from whole_runs import rollouts, rows, weights


def test_two_ranks_that_generate_for_each_other_train_the_same_weights(two_ranks):
    plain, balanced = two_ranks / "unbalanced", two_ranks / "balanced"
    assert weights(balanced) == weights(plain)
    rounded = {"rollout_logp_diff", "rollout_logp_diff_max", "parity"}  # the engine's log-probs, by its batches
    for ours, theirs in zip(rows(balanced), rows(plain), strict=True):
        assert {name for name in theirs if ours[name] != theirs[name]} <= rounded
    assert rollouts(balanced) == rollouts(plain) and len(rows(plain)) == 3
    lengths: dict[str, list[float]] = {}
    for record in rollouts(plain)[0]:
        lengths.setdefault(record["label"], []).append(record["response_length"])
    means = {sum(each) / len(each) for each in lengths.values()}
    assert len(means) == len(lengths) > 1  # by which the prompts of the next steps change their ranks
