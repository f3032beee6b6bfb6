"""Single rollouts, and how they become padded micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .samples import Samples, SamplesVL, pad_rollouts
from .vision import VisionTensors

T = torch.Tensor


@dataclass
class PromptFeatures:
    """What all rollouts of one prompt share, by reference: expanded ids, media, and what the model reads of them."""

    text: str
    token_ids: list[int]
    group_id: int
    reference: Any = None
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: list = field(default_factory=list)
    videos: list = field(default_factory=list)
    vision: VisionTensors = field(default_factory=VisionTensors)


@dataclass
class Rollout:
    """One response. `log_probs` are the engine's; reward fields are set once it is scored."""

    prompt: PromptFeatures
    token_ids: list[int]
    log_probs: list[float] | None
    text: str
    truncated: bool
    sample_id: int
    policy_version: int = 0
    reward: float | None = None
    valid: bool = True
    components: dict[str, float] = field(default_factory=dict)


def collate(rollouts: list[Rollout], pad_id: int, vision: bool) -> Samples | SamplesVL:
    """A padded micro-batch of B rollouts, in order; SamplesVL for vision models, also without any image."""
    sequences, attention_mask, action_mask = pad_rollouts(
        [rollout.prompt.token_ids for rollout in rollouts], [rollout.token_ids for rollout in rollouts], pad_id
    )
    fields: dict[str, Any] = {
        "sequences": sequences,
        "attention_mask": attention_mask,
        "action_mask": action_mask,
        "group_ids": torch.tensor([rollout.prompt.group_id for rollout in rollouts]),
        "sample_ids": torch.tensor([rollout.sample_id for rollout in rollouts]),
        "truncated": torch.tensor([rollout.truncated for rollout in rollouts]),
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "responses": [rollout.text for rollout in rollouts],
        "labels": [rollout.prompt.label for rollout in rollouts],
        "references": [rollout.prompt.reference for rollout in rollouts],
        "metadata": [rollout.prompt.metadata for rollout in rollouts],
        "rollout_log_probs": _pad_log_probs(rollouts, action_mask),
        "policy_version": rollouts[0].policy_version,
    }
    if rollouts[0].reward is not None:
        fields["rewards"] = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
        fields["reward_valid"] = torch.tensor([rollout.valid for rollout in rollouts])
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.components)
        fields["reward_metrics"] = {
            name: torch.tensor([rollout.components.get(name, float("nan")) for rollout in rollouts]) for name in names
        }
    return SamplesVL(**fields, **_vision_fields(rollouts)) if vision else Samples(**fields)


def _pad_log_probs(rollouts: list[Rollout], action_mask: T) -> T | None:
    if any(rollout.log_probs is None for rollout in rollouts):
        return None
    padded = torch.zeros(action_mask.shape, dtype=torch.float32)
    for row, rollout in enumerate(rollouts):
        padded[row, : len(rollout.log_probs)] = torch.tensor(rollout.log_probs)
    return padded


def _vision_fields(rollouts: list[Rollout]) -> dict[str, Any]:
    prompts = [rollout.prompt for rollout in rollouts]
    return {
        "vision": VisionTensors.gather(prompt.vision for prompt in prompts),
        "image_counts": torch.tensor([len(prompt.images) for prompt in prompts]),
        "video_counts": torch.tensor([len(prompt.videos) for prompt in prompts]),
        "raw_images": [prompt.images for prompt in prompts],
        "raw_videos": [prompt.videos for prompt in prompts],
    }
