"""A prompt that is computed once for its completions: losses and gradients of the samples as if each stood alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from equality import adapters, assert_same, loss_and_gradients
from tiny_models import actor_of, checkpoint_of, features_of, inputs_of, prompts_for

from lightrft_visual.batches.rollouts import Rollout
from lightrft_visual.embedded.tiny_vlm import VISION_FAMILIES


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def grouped(checkpoint, batch, completions: int = 3, seed: int = 0) -> list[Rollout]:
    """Responses of 1 to 7 tokens, those of a prompt not beside each other."""
    draw = np.random.default_rng(seed)
    return [
        Rollout(replace(prompt, group_id=place), draw.integers(0, 256, draw.integers(1, 8)).tolist(), None, "", False,
                sample_id=place + 7 * turn)
        for turn in range(completions)
        for place, prompt in enumerate(features_of(checkpoint, batch))
    ]  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda model: model, adapters], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["qwen2", *VISION_FAMILIES])
def test_a_shared_prompt_equals_its_copies(root, kind, wrap):
    checkpoint = checkpoint_of(root, kind)
    actor = actor_of(checkpoint, wrap=wrap)
    rollouts = grouped(checkpoint, prompts_for(checkpoint))
    padded = loss_and_gradients(actor, [inputs_of(checkpoint, rollouts)])
    actor.backbone.share_prefix = True
    for packed in (False, True):
        assert_same(padded, loss_and_gradients(actor, [inputs_of(checkpoint, rollouts, packed)]), 1e-5)
