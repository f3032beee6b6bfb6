"""The run's own reward models in the plan: which there are, and what they hold at rest and while one of them scores."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSequenceClassification

from ..config.shared import RewardConfig
from ..rewards.scorers import named_entries
from .meta import on_meta
from .table import Item
from .zero import Model, Zero


def reward_models(reward: RewardConfig) -> dict[str, Model]:
    """The numbers of each checkpoint of `reward_pretrain` by its name, in the precision that it is stored in.

    A hub name that is not in the cache is left out: its shape is nowhere to be found.
    """
    found = {}
    for name, path in named_entries(reward.reward_pretrain).items():
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=not Path(path).is_dir())
        except (OSError, ValueError):
            continue  # the run itself says what it cannot load
        text = "Sequence" in (config.architectures or [""])[0]
        auto = AutoModelForSequenceClassification if text else AutoModelForImageTextToText
        dtype = config.dtype or torch.float32
        module = on_meta(lambda auto=auto, config=config, dtype=dtype: auto.from_config(config, dtype=dtype))
        found[f"reward model {name}"] = Model.of(module.requires_grad_(False), dtype.itemsize)
    return found


def reward_items(models: dict[str, Model], zero: Zero, offload: bool, at_work: str | None = None) -> list[Item]:
    """Their weights, divided under stage 3; offload: those that are not `at_work` wait on the host."""
    items = []
    for name, model in models.items():
        weights = Item(
            f"{name}: weights", model.bytes / zero.share(3), "reward_cpu_offload, zero_stage 3, a reward server"
        )
        items.append(weights.on_host(offload and name != at_work))
        if name == at_work:
            items += zero.gathered(model)
    return items
