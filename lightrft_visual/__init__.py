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
    )
    from .inference import evaluate, sample
    from .trainer.hooks import StepHook, StopRun

__version__ = "0.1.0"

_EXPORTS = {
    "StepHook": "trainer.hooks", "StopRun": "trainer.hooks", "evaluate": "inference", "sample": "inference",
}  # fmt: skip
__all__ = [
    "DDPOTrainer", "DiffusionDPOTrainer", "DiffusionNFTTrainer", "FlowGRPOTrainer", "GRPOTrainer", "PPOTrainer",
    "RLOOTrainer", "Result", "RewardFLTrainer", "SFTTrainer", "StepHook", "StopRun", "evaluate", "sample",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS.get(name, 'api')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
