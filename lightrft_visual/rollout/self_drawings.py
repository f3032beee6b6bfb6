"""The model draws what it described: the image that it makes of its own answer, beside the one that it was shown.

A description is worth what can be drawn from it. The drawn image becomes the sample's image for scorers, and what it
was shown its source image, so that `source_likeness` compares them; a scorer of captions holds it against the row's
reference. The answer alone is trained by it. A model can agree with itself on a code that nobody else reads: beside
such a reward there should be one of the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batches.prompts import PromptBatch
from ..batches.rollouts import Rollout
from ..batches.sampling import SamplingSettings
from ..config.vl import DataConfig
from ..data.placeholders import MediaConventions, ModelInput
from ..data.prompts import render_prompt
from ..data.rows import PromptRow
from .stage import RolloutStage


@dataclass
class SelfDrawings:
    """Draws by the likeliest tokens. data: `redraw_key` names the rows' column that is true where it is to be done.
    media: the conventions of the model's family. An answer that can be no prompt stays without an image: one that is
    too long, or spells out a token that marks images."""

    stage: RolloutStage
    model_input: ModelInput
    data: DataConfig
    media: type[MediaConventions]
    guidance_scale: float = 1.0

    def draw(self, rollouts: Sequence[Rollout]) -> None:
        """Fill the image of every answer whose row asks for it. Every rank calls it, also one without any."""
        asked = [each for each in rollouts if not each.prompt.draws and each.prompt.metadata.get(self.data.redraw_key)]
        prompts = {each.sample_id: prompt for each in asked if (prompt := self._prompt(each)) is not None}
        described = [each for each in asked if each.sample_id in prompts]
        batch = PromptBatch.of(list(prompts.values()), ids=torch.tensor(list(prompts), dtype=torch.long))
        greedy = SamplingSettings(n=1, temperature=0.0, guidance_scale=self.guidance_scale)
        for rollout, made in zip(described, self.stage.generate(batch, greedy, purpose="self drawing")):
            rollout.image = made.image

    def _prompt(self, rollout: Rollout) -> str | None:
        """None for an answer that can be no prompt."""
        if any(token in rollout.text for token in self.media.reserved(self.model_input)):
            return None
        content = [{"type": "text", "text": rollout.text}]
        source = f"prompt {rollout.prompt.group_id}"
        row = PromptRow([{"role": "user", "content": content}], source=source, draw=True)
        prompt = render_prompt(row, self.model_input, self.data, self.media)
        data = self.stage.data_processor
        return prompt if len(data.tokenizer(prompt)["input_ids"]) <= data.prompt_max_len else None
