"""Images that do not match their placeholders, prefill and decode, critics, tokens that are never sampled."""

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    actor_of,
    checkpoint_of,
    inputs_of,
    load,
    mixed_prompts,
    perturb,
    prompts_for,
    rollouts_of,
)  # fmt: skip

from lightrft_visual.errors import DataError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.models.vlm.actor import Critic


def scored(actor, inputs):
    with torch.no_grad():
        return actor(inputs, ScoringRule(), with_entropy=False).log_probs


# --- images and placeholders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_what_does_not_match_is_an_error_that_names_the_sample(root, packed):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    actor = actor_of(checkpoint)
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, mixed_prompts()), packed)
    image, video = checkpoint.config.image_token_id, checkpoint.config.video_token_id
    cases = [
        (image, 1, r"sample 10\d has \d+ image tokens, its images have \d+ features"),
        (image, -1, r"sample 10\d has \d+ image tokens|no placeholder tokens"),
        (video, 1, r"sample 10\d has \d+ video tokens, its videos have \d+ features"),
    ]
    for token, change, message in cases:
        broken = inputs.sequences.clone()
        places = (broken == token).nonzero()
        row, column = places[0] if change < 0 else places[-1]
        broken[row, column if change < 0 else column + 1] = 5 if change < 0 else token
        with pytest.raises(DataError, match=message):
            scored(actor, replace(inputs, sequences=broken))


def test_an_image_too_many_is_an_error(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, mixed_prompts(videos=False)))
    grids = inputs.vision.get("image_grid_thw")
    grids = torch.cat([grids, grids[-1:]])
    with pytest.raises(DataError, match=r"1 image\(s\) of the batch have no placeholder tokens"):
        scored(actor_of(checkpoint), replace(inputs, vision=inputs.vision.replaced("image_grid_thw", grids)))
    missing = replace(inputs, vision=VisionTensors())
    with pytest.raises(DataError, match="sample 101 has 4 image tokens, its images have 0 features"):
        scored(actor_of(checkpoint), missing)


# --- prefill and decode --------------------------------------------------------------------------------------------


# --- critic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
def test_a_critic_has_a_value_for_each_action_packed_and_padded(root, kind):
    checkpoint = checkpoint_of(root, kind)
    critic = Critic(load(checkpoint.path, checkpoint.vision))
    rollouts = rollouts_of(checkpoint, prompts_for(checkpoint))
    padded, packed = (inputs_of(checkpoint, rollouts, packed) for packed in (False, True))
    assert not critic(padded).any()
    perturb(critic.value_head, 0, 0.1)
    values = critic(padded)
    assert values.shape == padded.action_mask.shape and values.dtype == torch.float32
    assert not values[~padded.action_mask].any() and values[padded.action_mask].abs().min() > 0
    torch.testing.assert_close(critic(packed), values, atol=1e-5, rtol=0)
    values.sum().backward()
    assert critic.value_head.weight.grad.any()
    assert not any("lm_head" in name for name, _ in critic.named_parameters())


def test_banned_tokens_are_the_vision_tokens_and_the_rows_without_text(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    names = [checkpoint.tokenizer.convert_ids_to_tokens(token) for token in banned]
    wanted = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    assert [name for name in names if name is not None] == wanted
    assert len(names) - 5 == checkpoint.config.get_text_config().vocab_size - len(checkpoint.tokenizer)
