"""The policy: a transformers model that scores the response tokens of rollouts and experience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ...errors import ConfigError
from ...experience.model_inputs import ModelInputs
from ...experience.sampling import ScoringRule
from ...runtime.checkpoint.adapted import is_adapted
from ...runtime.sequence import SequenceGroup
from ..logprobs import LogProbLinear
from .backbone import Backbone

if TYPE_CHECKING:
    from peft import PeftModel

T = torch.Tensor


@dataclass
class ActorOutput:
    """log_probs and entropy (nats), each (B, A) float32 with 0 where the action mask is false."""

    log_probs: T
    entropy: T | None


class Actor(nn.Module):
    """Scores responses under the distribution that they were sampled from.

    model: a transformers model with a language-model head, or a peft model around one. banned_ids: tokens that the
    engine never samples; they leave the softmax here too. eos_ids: end tokens, banned on the first tokens of a response
    where the rule says so. share_prefix, sequence: see `Backbone`; ConfigError for a sequence of a model that draws.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        banned_ids: list[int],
        eos_ids: list[int],
        share_prefix: bool = False,
        sequence: SequenceGroup | None = None,
    ):
        super().__init__()
        self.model = model
        transformer = self.transformer
        self.head = [LogProbLinear.adopt(transformer.get_output_embeddings())]  # in a list: not a second child module
        self.backbone = Backbone(transformer, share_prefix, sequence)
        self.drawing = self.backbone.family.drawing(transformer)
        if sequence is not None and self.drawing is not None:
            raise ConfigError("sp_size: the halves of guided images are not divided over ranks; leave it at 1")
        self.register_buffer("banned_ids", torch.tensor(banned_ids, dtype=torch.long), persistent=False)
        self.register_buffer("eos_ids", torch.tensor(sorted(set(eos_ids)), dtype=torch.long), persistent=False)
        with_eos = sorted({*banned_ids, *eos_ids})
        self.register_buffer("banned_with_eos", torch.tensor(with_eos, dtype=torch.long), persistent=False)

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformers model, without a peft wrapper around it."""
        return self.model.get_base_model() if is_adapted(self.model) else self.model

    @property
    def config(self):
        """The transformers configuration of the model."""
        return self.transformer.config

    def forward(self, inputs: ModelInputs, rule: ScoringRule, with_entropy: bool = True) -> ActorOutput:
        """Log-probs and entropy of every action. Raises DataError when images and placeholders do not match."""
        mask = inputs.action_mask
        indices = inputs.action_indices()[mask]
        targets = inputs.sequences.flatten()[indices + 1]
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)[mask]
        if self.drawing is None:
            hidden = self.backbone.hidden_at(inputs, indices)
            scores = self._score(hidden.values, targets[hidden.own], columns[hidden.own], rule, with_entropy)
            log_probs, entropy = (None if each is None else hidden.joined(each) for each in scores)
        else:
            log_probs, entropy = self._score_either(inputs, indices, targets, columns, rule, with_entropy)
        return ActorOutput(_scatter(log_probs, mask), _scatter(entropy, mask) if with_entropy else None)

    def _score_either(
        self, inputs: ModelInputs, indices: T, targets: T, columns: T, rule: ScoringRule, with_entropy: bool
    ) -> tuple[T, T | None]:
        """The same where actions may be tokens of images. Both heads run, on no rows where there are none: ranks of one
        process group stay in step."""
        drawn, count = targets >= self.drawing.first, len(indices)
        samples = self.drawing.drawn_samples(inputs)
        in_image = samples.unsqueeze(1).expand_as(inputs.action_mask)[inputs.action_mask]
        text = ~drawn
        guided = rule.guidance_scale != 1 and bool(samples.any())
        if guided:
            inputs, further = self.drawing.with_halves(inputs, samples)
            indices = torch.cat([indices, further[inputs.action_mask[len(samples) :]]])
        hidden = self.backbone.hidden_at(inputs, indices).values
        words = self._score(hidden[:count][text], targets[text], columns[text], rule, with_entropy)
        unguided = hidden[count:][drawn[in_image]] if guided else None
        features = self.drawing.guided(hidden[:count][drawn], unguided, rule.guidance_scale)
        codes, temperature = targets[drawn] - self.drawing.first, _temperature(columns[drawn], rule)
        image = self.drawing.head(features, codes, temperature, with_entropy=with_entropy)
        return tuple(
            None if one is None else one.new_zeros(count).masked_scatter(text, one).masked_scatter(drawn, other)
            for one, other in zip(words, image)
        )

    def _score(self, hidden: T, targets: T, columns: T, rule: ScoringRule, with_entropy: bool):
        """(N) log-probs and entropy of N actions at response positions `columns`."""
        temperature, head = _temperature(columns, rule), self.head[0]
        if not rule.eos_banned_tokens:
            return head(hidden, targets, temperature, self.banned_ids, with_entropy)
        early = columns < rule.eos_banned_tokens
        log_probs, entropy = hidden.new_zeros(len(targets), dtype=torch.float32), None
        entropy = torch.zeros_like(log_probs) if with_entropy else None
        for where, banned in ((early, self.banned_with_eos), (~early, self.banned_ids)):
            part = temperature[where] if isinstance(temperature, T) else temperature
            scored, std = head(hidden[where], targets[where], part, banned, with_entropy)
            log_probs = log_probs.masked_scatter(where, scored)
            entropy = entropy.masked_scatter(where, std) if with_entropy else None
        return log_probs, entropy


def _temperature(columns: T, rule: ScoringRule) -> float | T:
    """Of all actions, or (N) of each where the first tokens have their own."""
    if rule.first_token_temperature is None:
        return rule.temperature
    temperature = torch.full_like(columns, rule.temperature, dtype=torch.float32)
    return temperature.masked_fill(columns == 0, rule.first_token_temperature)


def _scatter(values: T, mask: T) -> T:
    """(N) values at the true places of mask (B, A), zeros elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
