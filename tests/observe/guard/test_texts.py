"""What is counted on sets of responses: exact facts."""

from __future__ import annotations

import pytest

from lightrft_visual.observe.guard.watch import repetition, text_statistics


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([], 0), ([1], 0), ([1, 1], 0), ([1, 1, 1], 0.5), ([1, 2, 1, 2, 1], 0.5), ([1, 2, 3, 4], 0)],
)
def test_repetition(tokens, expected):
    assert repetition(tokens) == expected


def alone(own) -> list:
    return [own]


def test_same_answers_within_and_between_groups():
    found = text_statistics([[1], [1], [1], [2], [1], [1]], [0, 0, 0, 0, 7, 7], alone)
    assert found == {"repetition": 0, "identical_share": (0.75 + 1.0) / 2, "common_answer": 1.0}
    found = text_statistics([[1], [1], [2], [2]], [0, 0, 1, 1], alone)
    assert found["common_answer"] == 0.5 and found["identical_share"] == 1.0


def test_what_cannot_be_compared_is_left_out():
    assert text_statistics([[1], [2]], [0, 1], alone) == {"repetition": 0}
    assert text_statistics([[1], [1]], [0, 0], alone) == {"repetition": 0}


def test_each_rank_has_the_statistics_of_all_also_with_no_group_to_compare():
    tokens, groups = [[1, 1, 1], [1, 1, 1], [2], [3], [1, 1, 1], [4]], [0, 0, 1, 1, 2, 2]
    sent: list = []
    for part in (slice(0, 2), slice(2, 2), slice(2, 6)):
        text_statistics(tokens[part], groups[part], lambda own: sent.append(own) or [own])
    whole = text_statistics(tokens, groups, alone)
    assert text_statistics([], [], lambda _: sent) == whole
    assert whole == {"repetition": 0.25, "identical_share": pytest.approx(2 / 3), "common_answer": pytest.approx(2 / 3)}
    assert text_statistics([], [], alone) == {}
