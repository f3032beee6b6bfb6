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


def test_same_answers_within_and_between_groups():
    found = text_statistics([[1], [1], [1], [2], [1], [1]], [0, 0, 0, 0, 7, 7])
    assert found == {"repetition": 0, "identical_share": (0.75 + 1.0) / 2, "common_answer": 1.0}
    found = text_statistics([[1], [1], [2], [2]], [0, 0, 1, 1])
    assert found["common_answer"] == 0.5 and found["identical_share"] == 1.0


def test_what_cannot_be_compared_is_left_out():
    assert text_statistics([[1], [2]], [0, 1]) == {"repetition": 0}
    assert text_statistics([[1], [1]], [0, 0]) == {"repetition": 0}
