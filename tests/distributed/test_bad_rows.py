"""Whole runs on data with bad rows of every cause: counted exactly, batches full, resumable, alike on any ranks."""

import json
from collections import Counter

import pytest
from hostile import AT_RUN_TIME, bad_rows
from plans import HOSTILE_STEPS
from whole_runs import rollouts, rows, weights


def listed(folder):
    return [json.loads(line) for line in (folder / "bad_rows.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_each_bad_row_is_counted_by_its_cause_and_the_run_goes_on(request, tmp_path, ranks):
    folder = request.getfixturevalue(ranks) / "hostile"
    found, wanted = listed(folder), Counter(cause for cause, _ in bad_rows(tmp_path))
    assert Counter(row["cause"] for row in found) == wanted
    assert {row["cause"] for row in found if row["found"] != "start"} == {AT_RUN_TIME}
    assert len(wanted) >= 20 and len({row["source"] for row in found}) == len(found)
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "Rows left out of the data" in report and all(cause in report for cause in wanted)
    steps = rows(folder)
    assert len(steps) == HOSTILE_STEPS and steps[-1]["bad_rows"] == wanted.total()
    assert steps[0]["bad_rows"] < wanted.total()
    assert {len(step) for step in rollouts(folder)} == {32}  # every batch is full


def test_ranks_replace_alike(one_rank, two_ranks):
    for one, two in zip(rollouts(one_rank / "hostile"), rollouts(two_ranks / "hostile")):
        assert sorted(record["prompt"] for record in one) == sorted(record["prompt"] for record in two)


def test_a_resumed_run_sees_the_same_rows(two_ranks):
    whole, resumed = two_ranks / "hostile", two_ranks / "hostile_resumed"
    assert rollouts(whole) == rollouts(resumed) and weights(whole) == weights(resumed)
    assert {row["source"] for row in listed(whole)} == {row["source"] for row in listed(resumed)}
