"""What a set of responses looks like in numbers that no reward decides: repetition and sameness."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence


def repetition(tokens: Sequence[Hashable]) -> float:
    """Share of a response's pairs of neighbouring tokens that stood before in it; 0 for fewer than two pairs."""
    pairs = list(zip(tokens, tokens[1:]))
    return 1 - len(set(pairs)) / len(pairs) if len(pairs) > 1 else 0.0


def text_statistics(tokens: Sequence[Sequence[int]], groups: Sequence[int]) -> dict[str, float]:
    """Of N responses and their groups: `repetition`, its mean; `identical_share`, the share of a group's responses that
    are its most common one; `common_answer`, the share of groups whose most common response is the same one. Two groups
    or more with two responses each are needed for the last two; they are left out otherwise."""
    by_group: dict[int, Counter] = defaultdict(Counter)
    for response, group in zip(tokens, groups):
        by_group[group][tuple(response)] += 1
    found = {"repetition": sum(map(repetition, tokens)) / len(tokens)}
    tops = [counts.most_common(1)[0] for counts in by_group.values()]
    if len(tops) < 2 or all(counts.total() < 2 for counts in by_group.values()):
        return found
    shares = [count / counts.total() for (_, count), counts in zip(tops, by_group.values())]
    most = Counter(response for response, _ in tops).most_common(1)[0][1]
    return found | {"identical_share": sum(shares) / len(shares), "common_answer": most / len(tops)}
