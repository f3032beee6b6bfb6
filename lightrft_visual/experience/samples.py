"""Rollouts for those who score them by themselves: one `Samples` holds one micro-batch of B samples, padded to S and A.

The last A columns of `sequences` are the actions (response tokens): prompts are left-padded, responses right-padded.
`SamplesVL` adds what the vision tower reads; a text-only sample in it has zero images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .vision import VisionName, VisionTensors

T = torch.Tensor


@dataclass
class Samples:
    """One micro-batch of rollouts.

    sequences (B, S) long; attention_mask (B, S) long, 1 on real tokens; action_mask (B, A) bool, true on sampled
    tokens; rollout_log_probs (B, A) float32, the engine's log-probs at the sampling temperature, 0 where masked.
    group_ids (B) long: samples of one prompt share one id; sample_ids (B) long: index in the global batch.
    truncated (B) bool: the response hit the length limit. Text fields are lists of length B.
    The reward engine fills rewards (B) float32, reward_valid (B) bool and reward_metrics {name: (B)}.
    """

    sequences: T
    attention_mask: T
    action_mask: T
    group_ids: T
    sample_ids: T
    truncated: T
    prompts: list[str]  # after the chat template
    responses: list[str]  # decoded, without special tokens when skip_special_tokens
    labels: list[str | None]
    references: list[Any]
    metadata: list[dict[str, Any]]  # the other columns of the data row
    rollout_log_probs: T | None = None
    policy_version: int = 0
    token_versions: T | None = None  # (B, A) of the policy that drew each token, -1 beside them; None where all are one
    rewards: T | None = None
    reward_valid: T | None = None
    reward_metrics: dict[str, T] = field(default_factory=dict)

    @property
    def num_actions(self) -> int:
        """A, the length of the longest response in tokens."""
        return self.action_mask.shape[1]

    @property
    def response_length(self) -> T:
        """(B) long: sampled tokens of each response."""
        return self.action_mask.sum(dim=1)

    @property
    def total_length(self) -> T:
        """(B) long: real tokens of each sequence."""
        return self.attention_mask.sum(dim=1)

    @property
    def queries(self) -> list[str]:
        """Prompt and response of each sample in one string."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses)]

    def __len__(self) -> int:
        return self.sequences.shape[0]


@dataclass
class SamplesVL(Samples):
    """Samples with vision inputs.

    vision: each sample's tensors, shared, not copied, in a group; `pixel_values` and the other names of the replay
    contract read them joined in sample order. image_counts, video_counts (B) long. raw_images, raw_videos: for each
    sample its PIL images and its videos, an empty list without any, shared likewise. drawn_images: what each sample
    drew, None where it did not; captions: what it was to draw, None where the answer is text.
    """

    vision: VisionTensors = field(default_factory=VisionTensors)
    image_counts: T | None = None
    video_counts: T | None = None
    raw_images: list[list] | None = None
    raw_videos: list[list] | None = None
    drawn_images: list[Any] | None = None
    captions: list[str | None] | None = None

    pixel_values = VisionName("pixel_values")
    image_grid_thws = VisionName("image_grid_thw")
    pixel_values_videos = VisionName("pixel_values_videos")
    video_grid_thws = VisionName("video_grid_thw")


def pad_rollouts(
    prompt_ids: list[list[int]], response_ids: list[list[int]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts left-padded, responses right-padded, so that the last A columns are the actions.

    Returns (sequences (B, S) long, attention_mask (B, S) long, action_mask (B, A) bool).
    """
    width = max(len(ids) for ids in prompt_ids)
    actions = max(1, *(len(ids) for ids in response_ids))
    sequences = torch.full((len(prompt_ids), width + actions), pad_id, dtype=torch.long)
    attention_mask = torch.zeros_like(sequences)
    action_mask = torch.zeros(len(prompt_ids), actions, dtype=torch.bool)
    for index, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        span = slice(width - len(prompt), width + len(response))
        sequences[index, span] = torch.tensor(prompt + response)
        attention_mask[index, span] = 1
        action_mask[index, : len(response)] = True
    return sequences, attention_mask, action_mask
