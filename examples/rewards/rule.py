"""The smallest reward: one function that names what it reads and returns one number a sample.

    deepspeed examples/train_grpo_vl.py --reward_fn examples/rewards/rule.py:score

In vision-language training `completions` are the responses and `references` the answers of the data rows.
"""

from __future__ import annotations


def score(completions: list[str], references: list[str | None]) -> tuple[list[float | None], dict[str, list[float]]]:
    """1 for the right answer, 0.2 for an answer that mentions it; None (left out) without a reference.

    The second part of what it returns are further numbers for the metrics.
    """
    rewards: list[float | None] = []
    for completion, reference in zip(completions, references):
        if reference is None:
            rewards.append(None)
            continue
        given, wanted = completion.strip().lower(), str(reference).strip().lower()
        rewards.append(1.0 if given == wanted else 0.2 if wanted in given else 0.0)
    return rewards, {"answer_length": [float(len(completion)) for completion in completions]}


async def brief(completions: list[str], limit: int = 40) -> list[float]:
    """An asynchronous reward is awaited. Shorter than `limit` characters is 1, twice as long 0."""
    return [min(1.0, max(0.0, 2 - len(completion) / limit)) for completion in completions]
