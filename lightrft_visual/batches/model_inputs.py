"""What a backbone forward reads, taken from rollouts or from experience, padded or packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .experience import Experience, ExperienceVL
from .ragged import unpack_actions
from .samples import Samples, SamplesVL

T = torch.Tensor

_VISION_NAMES = (
    "pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "video_seconds_per_grid",
)  # fmt: skip


@dataclass
class ModelInputs:
    """Padded: sequences and attention_mask (B, S), the last A columns are actions. Packed: (1, total) rows, with
    `packed_seq_lens` (tokens of each sample). action_mask (B, A) bool, right-padded, in both forms.
    num_actions: in packed form, action columns of each sample. video_seconds_per_grid (sum of videos): for models that
    place frames in time by it. sample_ids (B): who to name in errors.
    """

    sequences: T
    attention_mask: T
    action_mask: T
    packed_seq_lens: list[int] | None = None
    num_actions: list[int] | None = None
    pixel_values: T | None = None
    image_grid_thws: T | None = None
    pixel_values_videos: T | None = None
    video_grid_thws: T | None = None
    video_seconds_per_grid: T | None = None
    sample_ids: T | None = None

    @classmethod
    def of(cls, batch: Samples | Experience) -> ModelInputs:
        """Inputs of a micro-batch of rollouts or experience; no copies."""
        vision = {}
        if isinstance(batch, (SamplesVL, ExperienceVL)):
            vision = {name: _none_if_empty(getattr(batch, name)) for name in _VISION_NAMES}
        vision["sample_ids"] = batch.sample_ids if isinstance(batch, Samples) else batch.sample_id
        if isinstance(batch, Samples) or not batch.is_packed:
            return cls(batch.sequences, batch.attention_mask, batch.action_mask, **vision)

        mask = unpack_actions(batch.action_mask, batch.num_actions)
        return cls(
            batch.sequences, batch.attention_mask, mask.bool(), batch.packed_seq_lens, batch.num_actions, **vision
        )

    def to(self, device: torch.device | str) -> ModelInputs:
        """The same inputs with every tensor on `device`; a new object, the batch stays where it is."""
        moved = {name: value.to(device) if isinstance(value, T) else value for name, value in vars(self).items()}
        return ModelInputs(**moved)

    @property
    def is_packed(self) -> bool:
        return self.packed_seq_lens is not None

    @property
    def sample_lengths(self) -> list[int]:
        """Columns that each sample takes in its row."""
        if self.packed_seq_lens is not None:
            return self.packed_seq_lens
        return [self.sequences.shape[1]] * self.sequences.shape[0]

    def action_rows(self) -> T:
        """(B, A) long: where in the flattened (rows * S) hidden states each action is predicted from.

        That is the position before the action. Rows of masked columns are clamped into range; the mask drops them.
        """
        lengths = torch.tensor(self.sample_lengths, device=self.sequences.device)
        width = self.action_mask.shape[1]
        actions = torch.full_like(lengths, width)
        if self.num_actions is not None:
            actions = torch.tensor(self.num_actions, device=lengths.device)
        first = lengths.cumsum(0) - actions - 1
        rows = first.unsqueeze(1) + torch.arange(width, device=lengths.device)
        return rows.clamp(0, self.sequences.numel() - 1)


def _none_if_empty(media: T | None) -> T | None:
    """Samples without media, from a batch in which others had some, hold media tensors of no rows."""
    return None if media is None or not len(media) else media
