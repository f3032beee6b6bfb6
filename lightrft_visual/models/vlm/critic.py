"""The value model of PPO: the actor's kind of backbone with a linear value head."""

from __future__ import annotations

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ...experience.model_inputs import ModelInputs
from ...runtime.sequence import SequenceGroup
from .backbone import Backbone

T = torch.Tensor


class Critic(nn.Module):
    """Values of the states that each action was taken in: the position before the action.

    The language-model head is dropped and a value head put in its place, starting at zero, so that first values are 0.
    share_prefix, sequence: see `Backbone`.
    """

    def __init__(self, model: PreTrainedModel, share_prefix: bool = False, sequence: SequenceGroup | None = None):
        super().__init__()
        self.backbone = Backbone(model, share_prefix, sequence)
        self.model = self.backbone.base
        hidden_size = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias=True)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, inputs: ModelInputs) -> T:
        """(B, A) float32 values, 0 where the action mask is false."""
        hidden = self.backbone.hidden_at(inputs, inputs.action_indices().flatten())
        values = self.value_head(hidden.values.to(self.value_head.weight.dtype)).squeeze(-1).float()
        values = hidden.joined(values).view(inputs.action_mask.shape)
        return values.masked_fill(~inputs.action_mask, 0.0)
