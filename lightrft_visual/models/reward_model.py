"""A vision-language reward model: a checkpoint's backbone with a scalar head, read at the last token."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ..errors import ConfigError
from ..experience.model_inputs import ModelInputs
from .vlm.backbone import Backbone

T = torch.Tensor
HEAD_FILE = "reward_head.safetensors"


class VLRewardModel(nn.Module):
    """Scores whole sequences of text and images, one number each.

    Its checkpoint is an ordinary vision-language one with HEAD_FILE beside it: `weight (1, H)` and, optionally,
    `bias (1)`.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.backbone = Backbone(model)
        self.model = self.backbone.base
        self.score_head = nn.Linear(model.config.get_text_config().hidden_size, 1)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> VLRewardModel:
        """Raises ConfigError when the folder has no fitting head: a random one would give random rewards."""
        head_file = Path(folder) / HEAD_FILE
        if not head_file.is_file():
            raise ConfigError(f"reward model {folder} has no {HEAD_FILE}, which holds the weights of its scalar head")
        model = cls(AutoModelForImageTextToText.from_pretrained(folder))
        head = load_file(head_file)
        weight = head.get("weight")
        if weight is None or weight.shape != model.score_head.weight.shape:
            wanted = tuple(model.score_head.weight.shape)
            raise ConfigError(f"{head_file}: weight must have shape {wanted}")
        model.score_head.load_state_dict({"weight": weight, "bias": head.get("bias", torch.zeros(1))})
        return model

    def save_head(self, folder: str | Path) -> None:
        """Write HEAD_FILE into a folder that holds the backbone's checkpoint."""
        state = {name: value.detach().float().contiguous() for name, value in self.score_head.state_dict().items()}
        save_file(state, Path(folder) / HEAD_FILE)

    def forward(self, inputs: ModelInputs) -> T:
        """(B) float32 scores of padded inputs, read at the last real token of each row."""
        size, length = inputs.sequences.shape
        hidden = self.backbone.hidden_states(inputs).view(size, length, -1)
        positions = torch.arange(length, device=hidden.device)
        last = (inputs.attention_mask.long() * positions).argmax(dim=1)
        chosen = hidden[torch.arange(size, device=hidden.device), last]
        return self.score_head(chosen.to(self.score_head.weight.dtype)).squeeze(-1).float()
