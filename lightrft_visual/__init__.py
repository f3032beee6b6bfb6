"""RL post-training for models that see (vision-language) and models that draw (diffusion).

Names are imported at first use: `import lightrft_visual` loads neither torch nor anything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        DDPOTrainer,
        DiffusionDPOTrainer,
        DiffusionNFTTrainer,
        FlowGRPOTrainer,
        GRPOTrainer,
        PPOTrainer,
        Result,
        RewardFLTrainer,
        RLOOTrainer,
        SFTTrainer,
        UnifiedTrainer,
    )
    from .experience.buffer import NaiveReplayBuffer
    from .experience.items import BufferItem, BufferItemDiffusion, BufferItemVL
    from .inference import evaluate, sample
    from .rewards.engine import RewardComputationEngine
    from .trainer.fast_exp_maker import FastExperienceMaker
    from .trainer.hooks import StepHook, StopRun

__version__ = "0.3.0.dev0"

_EXPORTS = {
    "StepHook": "trainer.hooks", "StopRun": "trainer.hooks", "evaluate": "inference", "sample": "inference",
    "FastExperienceMaker": "trainer.fast_exp_maker", "RewardComputationEngine": "rewards.engine",
    "NaiveReplayBuffer": "experience.buffer", "BufferItem": "experience.items", "BufferItemVL": "experience.items",
    "BufferItemDiffusion": "experience.items",
}  # fmt: skip
__all__ = [
    "BufferItem", "BufferItemDiffusion", "BufferItemVL", "DDPOTrainer", "DiffusionDPOTrainer", "DiffusionNFTTrainer",
    "FastExperienceMaker", "FlowGRPOTrainer", "GRPOTrainer", "NaiveReplayBuffer", "PPOTrainer", "RLOOTrainer",
    "Result", "RewardComputationEngine", "RewardFLTrainer", "SFTTrainer", "StepHook", "StopRun", "UnifiedTrainer",
    "evaluate", "sample",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS.get(name, 'api')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
