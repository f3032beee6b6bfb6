"""Rollouts for reward tests."""

from typing import Any

import torch

from lightrft_visual.experience.types import SamplesVL


def make_samples(
    responses: list[str],
    references: list[Any] | None = None,
    labels: list[str | None] | None = None,
    metadata: list[dict] | None = None,
    images: list[list] | None = None,
    prompts: list[str] | None = None,
    first_id: int = 0,
) -> SamplesVL:
    """One micro-batch: prompts of 2 tokens, responses of 1 to 3, the first row left-padded by one."""
    size = len(responses)
    actions = torch.tensor([[True, i % 3 > 0, i % 3 > 1] for i in range(size)])
    attention = torch.cat([torch.ones(size, 2, dtype=torch.long), actions.long()], dim=1)
    attention[0, 0] = 0
    ids = torch.arange(first_id, first_id + size)
    return SamplesVL(
        sequences=torch.arange(size * 5).view(size, 5) + 1,
        attention_mask=attention,
        action_mask=actions,
        group_ids=ids // 2,
        sample_ids=ids,
        truncated=torch.zeros(size, dtype=torch.bool),
        prompts=prompts or [f"prompt {i}: " for i in range(size)],
        responses=responses,
        labels=labels or [None] * size,
        references=references or [None] * size,
        metadata=metadata or [{} for _ in range(size)],
        raw_images=images or [[] for _ in range(size)],
    )
