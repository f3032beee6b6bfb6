"""Each evaluation is written with what it was made with, and the first one says it on the screen."""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...observe.conditions import conditions, in_words
from ...observe.recorder import EVALUATIONS
from ..hooks import HookContext, StepHook


def held_out(evaluation: Any) -> list[str]:
    """The prompts of an evaluation of either kind of run, those that draw with hashes of their images. Raises
    ConfigError without any."""
    if evaluation is None:
        raise ConfigError("there is nothing to evaluate on: give eval_dataset")
    return evaluation.asked if hasattr(evaluation, "asked") else evaluation.prompts.prompts


class ConditionsHook(StepHook):
    """Writes evaluations.jsonl."""

    said = False

    def setup(self, context: HookContext) -> None:
        """Settings do not change during a run."""
        super().setup(context)
        self.found = conditions(context.config, held_out(context.parts.evaluation))

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        if not self.said:
            self.context.console.message(in_words(self.found))
            self.said = True
        self.context.recorder.log_line(EVALUATIONS, self.context.step(), {"metrics": dict(metrics), **self.found})


def build(parts: Any) -> ConditionsHook | None:
    """Where there is something to evaluate."""
    return ConditionsHook() if parts.evaluation is not None else None
