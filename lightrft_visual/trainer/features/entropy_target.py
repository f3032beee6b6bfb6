"""An entropy bonus that is steered (Skywork-OR1, arXiv 2505.22312), for `entropy_target`.

After each step the coefficient moves by `entropy_coef_step`: up where the step's entropy was below the target, else
down, between 0 and `entropy_coef_max`. The bonus counts only in steps that follow an entropy below the target.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...config.vl import AlgorithmConfig
from ..hooks import StepHook


class EntropyTargetHook(StepHook):
    """Gives each train batch the coefficient of its step."""

    name = "entropy_target"

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config, self.value, self.active = config, config.entropy_coef, True

    @property
    def coefficient(self) -> float:
        """That of the step in progress."""
        return self.value if self.active else 0.0

    def on_train_batch(self, batch: Any) -> Any:
        """The same batch, whose loss has the coefficient."""
        parts = [replace(part, settings=replace(part.settings, entropy_coef=self.coefficient)) for part in batch.parts]
        return replace(batch, parts=parts)

    def metrics(self) -> Mapping[str, float]:
        """`entropy_coef`."""
        return {"entropy_coef": self.coefficient}

    def on_metrics(self, metrics: Mapping[str, float]) -> None:
        """A step whose entropy is not known, as no update was made, moves nothing."""
        if "entropy" not in metrics:
            return
        self.active = metrics["entropy"] < self.config.entropy_target
        moved = self.value + (self.config.entropy_coef_step if self.active else -self.config.entropy_coef_step)
        self.value = min(max(moved, 0.0), self.config.entropy_coef_max)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "active": self.active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.active = float(state["value"]), bool(state["active"])


def build(parts: Any) -> EntropyTargetHook | None:
    """For `entropy_target`."""
    algorithm = parts.config.algorithm
    return None if algorithm.entropy_target is None else EntropyTargetHook(algorithm)
