"""Actor and critic: packed equals padded, alone equals together, both equal transformers' own forward; refusals."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from equality import PLAIN, adapters, assert_same, loss_and_gradients
from tiny_models import (
    actor_of,
    checkpoint_of,
    grouped_rollouts,
    inputs_of,
    load,
    mixed_prompts,
    perturb,
    prompts_for,
    rollouts_of,
    text_prompts,
)  # fmt: skip
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from watched import Operations

from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.models.loading import freeze
from lightrft_visual.models.vlm import actor as module
from lightrft_visual.models.vlm.actor import Actor, Backbone, Critic

EVERY = None  # the prompts


@pytest.mark.parametrize(
    ("kind", "lora", "chosen"),
    [
        ("qwen2", False, EVERY),
        ("qwen3_vl", False, EVERY),
        ("internvl", False, EVERY),
        ("qwen2_5_vl", True, EVERY),
        *(("qwen2_5_vl+tied", False, chosen) for chosen in (EVERY, [0], [1, 2], [0, 3, 0])),
    ],
    ids=str,
)
def test_packed_equals_padded_with_and_without_images(root, kind, lora, chosen):
    checkpoint = checkpoint_of(root, kind)
    actor = actor_of(checkpoint, wrap=adapters if lora else lambda model: model)
    prompts = prompts_for(checkpoint)
    rollouts = rollouts_of(checkpoint, prompts if chosen is EVERY else prompts.select(chosen))
    padded, packed = both_forms(checkpoint, rollouts)
    assert packed.is_packed and packed.sequences.shape[0] == 1
    assert_same(loss_and_gradients(actor, [padded]), loss_and_gradients(actor, [packed]), 1e-5)


def both_forms(checkpoint, rollouts):
    return [inputs_of(checkpoint, rollouts, packed) for packed in (False, True)]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
def test_a_critic_has_a_value_for_each_action_packed_padded_and_with_shared_prompts(root, kind):
    checkpoint = checkpoint_of(root, kind)
    critic = Critic(load(checkpoint.path, checkpoint.vision))
    padded, packed = both_forms(checkpoint, grouped_rollouts(checkpoint, prompts_for(checkpoint)))
    assert not critic(padded).any()
    perturb(critic.value_head, 0, 0.1)
    values = critic(padded)
    assert values.shape == padded.action_mask.shape and values.dtype == torch.float32
    assert not values[~padded.action_mask].any() and values[padded.action_mask].abs().min() > 0
    torch.testing.assert_close(critic(packed), values, atol=1e-5, rtol=0)
    values.sum().backward()
    assert critic.value_head.weight.grad.any()
    assert not any("lm_head" in name for name, _ in critic.named_parameters())
    critic.backbone.share_prefix = True
    torch.testing.assert_close(critic(padded), values, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_critic_in_bfloat16_has_values_finer_than_its_weights(root):
    checkpoint = checkpoint_of(root, "qwen2")
    critic = Critic(load(checkpoint.path, checkpoint.vision)).bfloat16()
    perturb(critic.value_head, 0, 0.1)
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, text_prompts()))
    values = critic(inputs)[inputs.action_mask]
    assert values.dtype == torch.float32 and (values != values.bfloat16()).float().mean() > 0.5


def test_backward_of_log_probs_reads_no_mask_as_a_device_would_be_waited_for(root):
    checkpoint = checkpoint_of(root, "qwen2")
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, text_prompts()), packed=True)
    output = actor_of(checkpoint)(inputs, PLAIN)
    with Operations() as asked:
        (output.log_probs.sum() + output.entropy.sum()).backward()
    assert asked.calls and not [name for name in asked.calls if "mask" in name or "nonzero" in name]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_size_of_micro_batches_does_not_matter(root, packed):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    actor = actor_of(checkpoint)
    rollouts = rollouts_of(checkpoint, prompts_for(checkpoint))
    whole = loss_and_gradients(actor, [inputs_of(checkpoint, rollouts, packed)])
    for size in (1, 2):
        parts = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
        assert_same(whole, loss_and_gradients(actor, [inputs_of(checkpoint, part, packed) for part in parts]), 3e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl+tied"])
def test_log_probs_are_those_of_transformers_own_forward(root, kind):
    checkpoint = checkpoint_of(root, kind)
    actor = actor_of(checkpoint, banned=[])
    rollouts = rollouts_of(checkpoint, prompts_for(checkpoint, videos=False))
    ours = actor(inputs_of(checkpoint, rollouts), PLAIN)
    for log_probs, entropy, rollout in zip(ours.log_probs, ours.entropy, rollouts):
        ids, count = torch.tensor([rollout.prompt.token_ids + rollout.token_ids]), len(rollout.token_ids)
        media = {"mm_token_type_ids": checkpoint.family.token_types(ids)} if checkpoint.vision else {}
        media |= rollout.prompt.vision.joined()
        logits = actor.model(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0]
        table = logits[-count - 1 : -1].log_softmax(dim=-1)
        theirs = table.gather(1, torch.tensor(rollout.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(log_probs[:count], theirs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[:count], -(table.exp() * table).sum(1), atol=1e-5, rtol=0)
        assert not log_probs[count:].any() and not entropy[count:].any()


@torch.no_grad()
def test_the_rule_of_sampling_is_the_rule_of_scoring(root):
    checkpoint = checkpoint_of(root, "qwen2")
    banned, eos = [3, 9, 300], checkpoint.tokenizer.eos_token_id
    actor = actor_of(checkpoint, banned=banned)
    rollouts = [r for r in rollouts_of(checkpoint, text_prompts()) if not set(r.token_ids) & {*banned, eos}]
    inputs = inputs_of(checkpoint, rollouts)
    rule = ScoringRule(temperature=0.7, first_token_temperature=5.0, eos_banned_tokens=2)
    hidden = actor.backbone.hidden_states(inputs)[inputs.action_indices()]
    logits = actor.head[0](hidden)
    logits[:, :1] /= 5.0
    logits[:, 1:] /= 0.7
    logits[..., banned] = float("-inf")
    logits[:, :2, eos] = float("-inf")
    targets = inputs.sequences[:, -inputs.action_mask.shape[1] :]
    theirs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    for with_entropy in (True, False):
        ours = actor(inputs, rule, with_entropy)
        torch.testing.assert_close(ours.log_probs[inputs.action_mask], theirs[inputs.action_mask], atol=1e-5, rtol=0)
        assert (ours.entropy is not None) == with_entropy


@pytest.mark.parametrize("prompts", [mixed_prompts(videos=False), text_prompts()], ids=["images", "text"])
def test_a_frozen_vision_tower_gets_no_gradient_and_changes_no_loss(root, prompts):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    actor, frozen = actor_of(checkpoint), actor_of(checkpoint)
    assert freeze(frozen.transformer, "true") > 10
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, prompts))
    whole, part = loss_and_gradients(actor, [inputs]), loss_and_gradients(frozen, [inputs])
    assert not any(".visual." in name for name in part[1])
    assert_same((whole[0], {name: whole[1][name] for name in part[1]}), part, 1e-6)


def test_a_model_without_a_plain_language_model_head_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bert"](num_hidden_layers=1, is_decoder=True))
    model.cls.predictions.decoder = torch.nn.Identity()
    with pytest.raises(ConfigError, match="'bert' cannot be trained: its language-model head is a Ident"):
        Actor(model, [], [])


def test_banned_tokens_are_the_vision_tokens_and_the_rows_without_text(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    banned = checkpoint.family.banned_ids(checkpoint.tokenizer)
    names = [checkpoint.tokenizer.convert_ids_to_tokens(token) for token in banned]
    wanted = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    assert [name for name in names if name is not None] == wanted
    assert len(names) - 5 == checkpoint.config.get_text_config().vocab_size - len(checkpoint.tokenizer)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("kind", "media", "change", "message"),
    [
        ("qwen2_5_vl", "image", 1, r"sample 10\d has \d+ image tokens, its images have \d+ features"),
        ("qwen2_5_vl", "image", -1, r"sample 10\d has \d+ image tokens|no placeholder tokens"),
        ("qwen2_5_vl", "video", 1, r"sample 10\d has \d+ video tokens, its videos have \d+ features"),
        ("internvl", "image", -1, "sample 101 has 3 image tokens, its images have 4 features"),
    ],
)
def test_images_that_do_not_match_their_placeholders_are_an_error_that_names_the_sample(
    root, packed, kind, media, change, message
):
    checkpoint = checkpoint_of(root, kind)
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, prompts_for(checkpoint)), packed)
    broken, token = inputs.sequences.clone(), getattr(checkpoint.config, f"{media}_token_id")
    row, column = (broken == token).nonzero()[0 if change < 0 else -1]
    broken[row, column if change < 0 else column + 1] = 5 if change < 0 else token
    with pytest.raises(DataError, match=message):
        actor_of(checkpoint)(replace(inputs, sequences=broken), PLAIN)


def test_an_image_too_many_and_no_images_at_all_are_errors(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    inputs = inputs_of(checkpoint, rollouts_of(checkpoint, mixed_prompts(videos=False)))
    grids = inputs.vision.get("image_grid_thw")
    more = inputs.vision.replaced("image_grid_thw", torch.cat([grids, grids[-1:]]))
    for vision, message in (
        (more, r"1 image\(s\) of the batch have no placeholder tokens"),
        (VisionTensors(), "sample 101 has 4 image tokens, its images have 0 features"),
    ):
        with pytest.raises(DataError, match=message):
            actor_of(checkpoint)(replace(inputs, vision=vision), PLAIN)


def test_blanks_stand_for_media_that_other_ranks_have_and_media_that_come_after_the_plan_are_named(monkeypatch):
    monkeypatch.setattr(module, "is_zero_param", lambda weight: True)
    media = {"image": "pixel_values", "video": "pixel_values_videos"}
    backbone = SimpleNamespace(stands_in=True, family=SimpleNamespace(media=media), base=torch.nn.Linear(1, 1))

    def lacking(vision: VisionTensors, *ranks: str) -> list[str]:
        ids = torch.ones(1, 2, dtype=torch.long)
        inputs = ModelInputs(ids, ids, ids.bool(), vision=vision, media=frozenset(ranks))
        return Backbone._missing_media(backbone, inputs)

    text, image = VisionTensors(), VisionTensors.of(pixel_values=torch.rand(4, 3))
    assert lacking(text) == lacking(text, "pixel_values") == ["image"]
    assert lacking(image, *media.values()) == lacking(text, "pixel_values_videos") == ["video"]
    assert lacking(image, "pixel_values") == []
    with pytest.raises(DataError, match="media after an update was planned"):
        lacking(image, "pixel_values_videos")
