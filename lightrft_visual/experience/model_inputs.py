"""What a backbone forward reads, taken from experience, padded or packed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .ragged import unpack_actions
from .types import Experience, ExperienceVL
from .vision import VisionTensors

T = torch.Tensor


@dataclass
class ModelInputs:
    """Padded: sequences and attention_mask (B, S), the last A columns are actions. Packed: (1, total) rows, with
    `packed_seq_lens` (tokens of each sample). action_mask (B, A) bool, right-padded, in both forms.
    num_actions: in packed form, action columns of each sample. vision: what the model reads of images and videos,
    joined only by the forward. sample_ids (B): who to name in errors. group_ids (B): whose prompt is the same.
    """

    sequences: T
    attention_mask: T
    action_mask: T
    packed_seq_lens: list[int] | None = None
    num_actions: list[int] | None = None
    vision: VisionTensors = field(default_factory=VisionTensors)
    sample_ids: T | None = None
    group_ids: T | None = None

    @classmethod
    def of(cls, batch: Experience | ExperienceVL) -> ModelInputs:
        """Inputs of a micro-batch; no copies."""
        media = {"sample_ids": batch.sample_id, "group_ids": batch.group_id}
        if isinstance(batch, ExperienceVL):
            media["vision"] = batch.vision
        if not batch.is_packed:
            return cls(batch.sequences, batch.attention_mask, batch.action_mask, **media)
        mask = unpack_actions(batch.action_mask, batch.num_actions).bool()
        return cls(batch.sequences, batch.attention_mask, mask, batch.packed_seq_lens, batch.num_actions, **media)

    def to(self, device: torch.device | str) -> ModelInputs:
        """The same inputs with every tensor on `device`; a new object, the batch stays where it is."""
        movable = (T, VisionTensors)
        moved = {name: value.to(device) if isinstance(value, movable) else value for name, value in vars(self).items()}
        return ModelInputs(**moved)

    @property
    def is_packed(self) -> bool:
        """Whether all samples lie in one row, without padding."""
        return self.packed_seq_lens is not None

    @property
    def sample_lengths(self) -> list[int]:
        """Columns that each sample takes in its row."""
        if self.packed_seq_lens is not None:
            return self.packed_seq_lens
        return [self.sequences.shape[1]] * self.sequences.shape[0]

    def action_indices(self) -> T:
        """(B, A) long: where in the flattened (rows * S) hidden states each action is predicted from.

        That is the position before the action. Rows of masked columns are clamped into range; the mask drops them.
        """
        lengths = torch.tensor(self.sample_lengths, device=self.sequences.device)
        width = self.action_mask.shape[1]
        actions = torch.full_like(lengths, width)
        if self.num_actions is not None:
            actions = torch.tensor(self.num_actions, device=lengths.device)
        first = lengths.cumsum(0) - actions - 1
        indices = first.unsqueeze(1) + torch.arange(width, device=lengths.device)
        return indices.clamp(0, self.sequences.numel() - 1)
