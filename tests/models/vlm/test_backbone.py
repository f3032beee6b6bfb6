"""Images that do not match their placeholders, prefill and decode, critics, and architectures without proof."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import Rig
from tiny_models import (
    actor_of,
    checkpoint_of,
    inputs_of,
    load,
    mixed_prompts,
    perturb,
    picture,
    prompts_for,
    rollouts_of,
    text_prompts,
)  # fmt: skip
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from lightrft_visual.config.vl import DataConfig, ModelConfig
from lightrft_visual.errors import DataError
from lightrft_visual.experience.rollouts import PromptBatch, SamplingSettings, ScoringRule
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.models.loading import open_checkpoint
from lightrft_visual.models.tiny.vlm import CHAT_TEMPLATE, QWEN_FAMILIES, VISION_FAMILIES, build_tokenizer
from lightrft_visual.models.vlm.actor import Critic
from lightrft_visual.rollout.hf import TransformersEngine, prompt_inputs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def scored(actor, inputs):
    with torch.no_grad():
        return actor(inputs, ScoringRule(), with_entropy=False).log_probs


# --- images and placeholders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_what_does_not_match_is_an_error_that_names_the_sample(root, family, packed):
    checkpoint = checkpoint_of(root, family)
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


@torch.no_grad()
@pytest.mark.parametrize("kind", [*VISION_FAMILIES, "qwen2"])
def test_token_by_token_equals_all_at_once(root, kind):
    checkpoint = checkpoint_of(root, kind)
    backbone = actor_of(checkpoint).backbone
    for batch in (prompts_for(checkpoint), text_prompts()):
        rollouts = [replace(r, token_ids=[7, 8, 9]) for r in rollouts_of(checkpoint, batch)]
        inputs = inputs_of(checkpoint, rollouts)
        whole = backbone.hidden_states(inputs).view(*inputs.sequences.shape, -1)
        prompts = prompt_inputs([r.prompt for r in rollouts], checkpoint.tokenizer.pad_token_id)
        cache = DynamicCache(config=checkpoint.config)
        hidden, positions, mask = backbone.prefill(prompts, cache)
        torch.testing.assert_close(hidden, whole[:, -4], atol=2e-5, rtol=0)
        for step, token in enumerate((7, 8, 9)):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            hidden = backbone.decode(torch.full((len(rollouts),), token), mask, positions, cache)
            positions = positions + 1
            torch.testing.assert_close(hidden, whole[:, step - 3], atol=2e-5, rtol=0)


# --- critic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*VISION_FAMILIES, "qwen2"])
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


# --- other architectures: padded only ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """LLaVA with four image tokens an image: another vision tower, no M-RoPE, pixel values without grids."""
    folder = tmp_path_factory.mktemp("llava")
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28,
            patch_size=14, projection_dim=32,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer) + 3, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    perturb(model, 1, 0.05)
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return open_checkpoint(str(folder), ModelConfig(), DataConfig())


def llava_prompts():
    return PromptBatch.of(
        ["where?", "<image> which shape is it?", "first <image> then <image>"],
        [[], [picture(0)], [picture(1, 90, 70), picture(2)]],
    )


def test_another_model_generates_and_scores_in_padded_form(llava):
    actor = actor_of(llava)
    rig = Rig(llava, actor, TransformersEngine(actor, llava.tokenizer))
    settings = SamplingSettings(n=3, max_new_tokens=6)
    assert rig.difference(llava_prompts(), settings) <= 1e-5
    assert llava.config.image_token_id in actor.banned_ids.tolist()
    alone = [rig.token_ids(llava_prompts().select([i]), settings) for i in range(3)]
    assert rig.token_ids(llava_prompts(), settings) == sum(alone, [])


def test_another_model_trains_padded_with_and_without_images(llava):
    actor = actor_of(llava)
    together = inputs_of(llava, rollouts_of(llava, llava_prompts()))
    whole = scored(actor, together)
    for place, rollout in enumerate(rollouts_of(llava, llava_prompts())):
        alone = scored(actor, inputs_of(llava, [rollout]))
        torch.testing.assert_close(alone[0], whole[place, : alone.shape[1]], atol=1e-5, rtol=0)
    text = inputs_of(llava, rollouts_of(llava, llava_prompts().select([0])))
    actor(text, ScoringRule()).log_probs.sum().backward()
    tower = [p for n, p in actor.named_parameters() if "multi_modal_projector" in n]
    assert all(p.grad is not None and not p.grad.any() for p in tower)


def test_images_of_another_model_that_do_not_match_are_an_error(llava):
    inputs = inputs_of(llava, rollouts_of(llava, llava_prompts()))
    broken = inputs.sequences.clone()
    row, column = (broken == llava.config.image_token_id).nonzero()[0]
    broken[row, column] = 5
    with pytest.raises(DataError, match="sample 101 has 3 image tokens, its images have 4 features"):
        scored(actor_of(llava), replace(inputs, sequences=broken))


def test_banned_tokens_are_the_vision_tokens_and_the_rows_without_text(root, llava):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    names = [checkpoint.tokenizer.convert_ids_to_tokens(token) for token in banned]
    wanted = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    assert [name for name in names if name is not None] == wanted
    assert len(names) - 5 == checkpoint.config.get_text_config().vocab_size - len(checkpoint.tokenizer)
    size = len(llava.tokenizer)
    assert llava.family.banned_ids(llava.tokenizer)[-3:] == [size, size + 1, size + 2]
