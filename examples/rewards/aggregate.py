"""Aggregating by hand, as in LightRFT: the function gets every model's and server's rewards and makes one of them.

deepspeed examples/train_grpo_vl.py --reward_fn examples/rewards/aggregate.py:reward_fn --remote_rm_url URL,URL
"""

from __future__ import annotations

from typing import Any

import torch


def reward_fn(
    model_reward_list: list[torch.Tensor],
    labels: list[str | None],
    queries: list[str],
    refs: list[Any],
    label_map: dict[str, Any] | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The smallest of the rewards: a sample is as good as its worst judge finds it. Failed samples never get here."""
    stacked = torch.stack(model_reward_list)
    return stacked.min(dim=0).values, {"spread": stacked.max(dim=0).values - stacked.min(dim=0).values}
