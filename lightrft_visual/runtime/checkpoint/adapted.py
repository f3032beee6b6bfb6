"""Whether a model has peft's adapters, asked without importing peft: runs without adapters have no need of it."""

from __future__ import annotations

import sys

from torch import nn


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`; where nobody has imported peft there is none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
