"""Batches: every tensor moves, and what a batch knows of itself."""

from dataclasses import fields

import pytest
import torch
from replay_cases import diffusion_item, text_item, vision_item

from lightrft_visual.experience.fields import Kind
from lightrft_visual.experience.items import make_experience_batch, replay_fields
from lightrft_visual.experience.types import ExperienceVL, map_tensors
from lightrft_visual.experience.vision import CONTRACT_NAMES

EVERY_TENSOR = {
    "kl": torch.ones(2),
    "action_entropy": torch.ones(2),
    "rollout_log_probs": torch.ones(2),
    "teacher_log_probs": torch.ones(2),
    "token_versions": torch.ones(2, dtype=torch.long),
    "group_id": torch.tensor(1),
    "sample_id": torch.tensor(1),
    "policy_version": torch.tensor(1),
    "valid": torch.tensor(True),
    "info": {"reward": 1.0, "metrics": {"format": torch.tensor(1.0)}, "parts": torch.ones(2), "kind": "count"},
}


def tensors_of(batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for each in fields(batch):
        map_tensors(getattr(batch, each.name), lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.mark.parametrize(
    "item",
    [
        text_item(**EVERY_TENSOR),
        vision_item(1, 1, video_seconds_per_grid=torch.ones(1), **EVERY_TENSOR),
        diffusion_item(),
    ],
)
def test_every_tensor_moves(item):
    batch = make_experience_batch([item, item])
    moved = batch.to_device("meta")
    assert moved is batch
    assert len(tensors_of(batch)) > 5
    assert all(tensor.device.type == "meta" for tensor in tensors_of(batch))


def test_every_vision_tensor_was_in_the_test_above():
    batch = make_experience_batch([vision_item(1, 1, video_seconds_per_grid=torch.ones(1), **EVERY_TENSOR)])
    kinds = {name: spec.kind for name, spec in replay_fields(ExperienceVL).items()}
    names = [name for name, kind in kinds.items() if kind is not Kind.OBJECTS]
    assert [name for name in [*names, *CONTRACT_NAMES] if getattr(batch, name) is None] == []
