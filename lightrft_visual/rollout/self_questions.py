"""The model's own view of what it drew: it is shown its image and asked a question about it.

The answer becomes the text of the drawn response, so that any reward of texts (`exact` with the row's reference, say)
scores whether the model finds in its image what was asked for. A model can agree with itself on an image that shows
nothing: beside such a reward there should be one from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batches.prompts import PromptBatch
from ..batches.rollouts import Rollout
from ..batches.sampling import SamplingSettings
from ..config.vl import DataConfig
from ..data.placeholders import ModelInput
from ..data.prompts import question_row, render_prompt
from ..errors import ConfigError, DataError
from ..models.vlm.families.base import VLMFamily
from .stage import RolloutStage


@dataclass
class SelfQuestions:
    """Asks by greedy answers of at most max_new_tokens. data: `ask_key` names the rows' column with the question."""

    stage: RolloutStage
    model_input: ModelInput
    data: DataConfig
    max_new_tokens: int

    def ask(self, rollouts: Sequence[Rollout]) -> None:
        """Fill the text of every drawn rollout whose row has a question. Every rank calls it, also one without any.

        Raises DataError for a question that is no text.
        """
        asked = [each for each in rollouts if each.image is not None and each.prompt.metadata.get(self.data.ask_key)]
        batch = PromptBatch.of(
            [self._prompt(rollout) for rollout in asked],
            [[rollout.image] for rollout in asked],
            ids=torch.tensor([rollout.sample_id for rollout in asked], dtype=torch.long),
        )
        greedy = SamplingSettings(n=1, temperature=0.0, max_new_tokens=self.max_new_tokens)
        for rollout, answer in zip(asked, self.stage.generate(batch, greedy, purpose="self")):
            rollout.text = answer.text

    def _prompt(self, rollout: Rollout) -> str:
        question = rollout.prompt.metadata[self.data.ask_key]
        if not isinstance(question, str):
            raise DataError(f"prompt {rollout.prompt.group_id}: the question in {self.data.ask_key!r} is no text")
        row = question_row(question, f"prompt {rollout.prompt.group_id}")
        return render_prompt(row, self.model_input, self.data)


def check_own_views(data: DataConfig, family: VLMFamily) -> None:
    """Raise ConfigError for `ask_key` or `redraw_key` of a model that cannot draw, or cannot see what it drew."""
    kind = family.config.model_type
    if data.redraw_key and not family.draws:
        raise ConfigError(f"redraw_key: a model of type {kind} writes text only; leave it out")
    if data.ask_key and not (family.draws and "image" in family.kinds):
        what = "reads no images" if family.draws else "writes text only"
        raise ConfigError(f"ask_key: a model of type {kind} {what}, so it says nothing of what it drew; leave it out")
