"""A prompt that is computed once for its completions: losses and gradients of the samples as if each stood alone."""

from dataclasses import replace

import pytest
import torch
from equality import PLAIN, adapters, assert_same, loss_and_gradients
from tiny_models import actor_of, checkpoint_of, grouped_rollouts, inputs_of, load, perturb, prompts_for, text_prompts
from transformers import AutoModelForImageTextToText, InternVLConfig

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.models.vlm.actor import Actor, Backbone
from lightrft_visual.models.vlm.families import family_of
from lightrft_visual.models.vlm.shared_prefix import SharedSequence


def assert_shared_equals_copies(actor: Actor, padded, *others, rule=PLAIN) -> dict[str, torch.Tensor]:
    """Of one batch padded and in other forms; the gradients."""
    wanted = loss_and_gradients(actor, [padded], rule)
    actor.backbone.share_prefix = True
    for each in (padded, *others):
        assert_same(wanted, loss_and_gradients(actor, [each], rule), 1e-5)
    return wanted[1]


@pytest.mark.parametrize(("kind", "lora"), [("qwen2", False), ("qwen2_5_vl", True)])
def test_a_shared_prompt_equals_its_copies(root, kind, lora):
    checkpoint = checkpoint_of(root, kind)
    actor = actor_of(checkpoint, wrap=adapters if lora else lambda model: model)
    rollouts = grouped_rollouts(checkpoint, prompts_for(checkpoint))
    assert_shared_equals_copies(actor, *(inputs_of(checkpoint, rollouts, packed) for packed in (False, True)))


def test_without_media_the_tower_still_gets_its_gradients(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    inputs = inputs_of(checkpoint, grouped_rollouts(checkpoint, text_prompts()))
    assert any("visual" in name for name in assert_shared_equals_copies(actor_of(checkpoint), inputs))


def test_the_first_tokens_have_rules_of_their_own(root):
    """All completions read their first token's distribution from one position; each keeps its temperature and bans."""
    checkpoint = checkpoint_of(root, "qwen2")
    inputs = inputs_of(checkpoint, grouped_rollouts(checkpoint, text_prompts()))
    rule = ScoringRule(temperature=0.7, first_token_temperature=5.0, eos_banned_tokens=2)
    assert_shared_equals_copies(actor_of(checkpoint), inputs, rule=rule)


# --- the row -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_holds_each_prompt_and_its_media_once(root, packed):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    rollouts = grouped_rollouts(checkpoint, prompts_for(checkpoint))
    prompts = {rollout.prompt.group_id: rollout.prompt for rollout in rollouts}
    inputs = inputs_of(checkpoint, rollouts, packed)
    row = SharedSequence.of(inputs)
    wanted = [
        [prompt.token_ids, *(each.token_ids for each in rollouts if each.prompt.group_id == group)]
        for group, prompt in prompts.items()
    ]
    ids = row.select(inputs.sequences).squeeze(0)
    assert [part.tolist() for part in ids.split(row.lengths)] == sum(wanted, [])
    assert [id(own) for own in row.vision.samples] == [id(p.vision.samples[0]) for p in prompts.values()]
    heads = {index for index, of in enumerate(row.continues) if of is None}
    assert len(heads) == len(prompts) and {of for of in row.continues if of is not None} == heads
    real = inputs.attention_mask.flatten() != 0
    assert torch.equal(ids[row.indices][real], inputs.sequences.flatten()[real])


def test_what_only_looks_alike_is_not_shared(root):
    checkpoint = checkpoint_of(root, "qwen2_5_vl")
    batch = prompts_for(checkpoint, videos=False).select([1])
    first = inputs_of(checkpoint, grouped_rollouts(checkpoint, batch, 2))
    prompt = first.sequences.shape[1] - first.action_mask.shape[1]
    other_text, holed = first.sequences.clone(), first.attention_mask.clone()
    other_text[1, prompt - 1] += 1
    holed[0, prompt - 2] = 0
    (own, _) = first.vision.samples
    equal = {name: value.clone() for name, value in own.items()}
    other = equal | {"pixel_values": equal["pixel_values"] + 1}
    assert SharedSequence.of(first) is not None
    assert SharedSequence.of(replace(first, vision=VisionTensors([own, equal]))) is not None
    for change in (
        *({"group_ids": groups} for groups in (None, torch.tensor([0, 1]), torch.tensor([-1, -1]))),
        *({"vision": VisionTensors(samples)} for samples in ([own, other], [first.vision.joined()])),
        {"sequences": other_text},
        {"attention_mask": holed},
    ):
        assert SharedSequence.of(replace(first, **change)) is None


@pytest.mark.parametrize("text", ["qwen3_moe", "llama"])
def test_other_language_models_inside_internvl(root, text):
    checkpoint = checkpoint_of(root, "internvl")
    settings = checkpoint.config.to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if text == "qwen3_moe" else {}
    settings["text_config"] |= {"model_type": text, "head_dim": 32, "layer_types": None, **experts}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(InternVLConfig(**settings))
    perturb(model, 1, 0.05)
    actor = Actor(model, checkpoint.family.banned_ids(checkpoint.tokenizer), checkpoint.eos_ids)
    assert actor.backbone.config.get_text_config().model_type == text
    inputs = inputs_of(checkpoint, grouped_rollouts(checkpoint, prompts_for(checkpoint)))
    assert_shared_equals_copies(actor, inputs)


@pytest.mark.parametrize("text", ["qwen3_next", "gpt_oss"])
def test_language_models_and_attention_that_are_not_proven_in_rows_are_refused(root, text):
    """Linear attention would carry a sample into the next one, and attention sinks are not looked at by segments."""
    family = family_of(InternVLConfig(text_config={"model_type": text}))
    reason = f"it is not proven for model type 'internvl' with a language model of type '{text}'"
    assert family.sharing_refused("auto") == reason
    with pytest.raises(ConfigError, match=f"packing_samples is not proven for .* of type '{text}'"):
        family.require_packing()
    assert family_of(InternVLConfig(text_config={"model_type": "qwen3"})).sharing_refused("auto") is None
    model = load(checkpoint_of(root, "qwen2").path, False)
    model.config._attn_implementation = "eager"
    with pytest.raises(ConfigError, match="share_prefix is not proven for model type 'qwen2' with attention eager"):
        Backbone(model, share_prefix=True)
