"""A run whose ranks generate for each other is the run without."""

from __future__ import annotations

import pytest
from plans import rows_apart, small
from whole_runs import rollouts, rows, run_plan, weights

from lightrft_visual.plugins.embedded.warmup import embedded_task


@pytest.mark.slow
def test_two_ranks_that_generate_for_each_other_train_the_same_weights(tmp_path, cache_root):
    """Rank 0 meets images alone and rank 1 text, whose responses have other lengths."""
    data = rows_apart(embedded_task(cache_root).train, tmp_path / "mixed.jsonl", steps=8)
    run = small(
        f"--engine_type hf --zero_stage 2 --prompt_data {data} --max_steps 3 --generate_max_len 12 --temperature 2.5"
    )
    run_plan({"plain": run, "balanced": [*run, "--balance_rollouts", "true"]}, tmp_path, cache_root, ranks=2)
    plain, balanced = tmp_path / "plain", tmp_path / "balanced"
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
