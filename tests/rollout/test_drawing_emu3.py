"""Emu3 draws with ids of its text vocabulary, ends each row with a token that is given, and reads images by codes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_rig import Rig
from tiny_models import actor_of, checkpoint_of, inputs_of, picture, prompts_for, turn
from transformers import AutoModelForImageTextToText

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.model_inputs import ModelInputs
from lightrft_visual.experience.prompts import PromptBatch
from lightrft_visual.experience.rollouts import Rollout, collate
from lightrft_visual.experience.sampling import SamplingSettings
from lightrft_visual.experience.vision import VisionTensors
from lightrft_visual.models.loading import add_lora
from lightrft_visual.models.vlm.families.emu3 import Emu3
from lightrft_visual.rollout.hf import TransformersEngine
from lightrft_visual.rollout.weight_sync import gathered_state_dict
from lightrft_visual.runtime.checkpoint.export import export_hf
from lightrft_visual.runtime.deepspeed import TrainEngine

SIDE = 4
PLAIN = SamplingSettings(n=2, max_new_tokens=6, temperature=0.8)
GUIDED = SamplingSettings(n=2, max_new_tokens=6, guidance_scale=3.0)
GREEDY = SamplingSettings(n=1, temperature=0.0, guidance_scale=3.0)


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Rig:
    checkpoint = checkpoint_of(tmp_path_factory.mktemp("checkpoints"), "emu3")
    actor = actor_of(checkpoint)
    return Rig(checkpoint, actor, TransformersEngine(actor, checkpoint.tokenizer, 8))


def prompts(rig: Rig) -> PromptBatch:
    drawn = [Emu3.begin_drawing(turn(text), rig.checkpoint.processor, "") for text in ("a circle", "a blue square 4*4")]
    return PromptBatch.of([drawn[0], turn("where?"), drawn[1], turn("how many red circles are there?")])


def check_replay(rig: Rig, rollouts: list[Rollout], settings: SamplingSettings) -> None:
    """Padded and packed, with prompts of their own and shared ones."""
    sampled = collate(rollouts, rig.checkpoint.tokenizer.pad_token_id, True)
    for packed in (False, True):
        for shared in (False, True):
            rig.actor.backbone.share_prefix = shared
            scored = rig.score(inputs_of(rig.checkpoint, rollouts, packed), settings.scoring)
            assert (scored - sampled.rollout_log_probs).abs().max() <= 1e-5, (packed, shared)
    rig.actor.backbone.share_prefix = False


@pytest.mark.parametrize("settings", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_drawn_tokens_are_scored_as_sampled_and_given_ones_as_certain(rig, settings):
    rollouts = rig.stage.generate(prompts(rig), settings)
    check_replay(rig, rollouts, settings)
    drawn = [rollout for rollout in rollouts if rollout.prompt.draws]
    assert len(drawn) == 4 and drawn[0].image.size == (32, 32)
    first, end = rig.actor.drawing.first, rig.actor.drawing.row_end
    for rollout in drawn:
        rows = torch.tensor(rollout.token_ids).view(SIDE, SIDE + 1)
        assert (rows[:, :SIDE] >= first).all() and (rows[:, SIDE] == end).all()
        chances = torch.tensor(rollout.log_probs).view(SIDE, SIDE + 1)
        assert (chances[:, SIDE] == 0).all() and (chances[:, :SIDE] < 0).all()
    written = [token for rollout in rollouts if not rollout.prompt.draws for token in rollout.token_ids]
    assert max(written) < first and end not in written


def test_given_tokens_have_no_gradient_and_the_vq_model_none(rig):
    rollouts = [rollout for rollout in rig.stage.generate(prompts(rig), GUIDED) if rollout.prompt.draws]
    batch = collate(rollouts, rig.checkpoint.tokenizer.pad_token_id, True)
    output = rig.actor(ModelInputs.of(batch), GUIDED.scoring)
    assert (output.entropy.view(-1, SIDE, SIDE + 1)[..., SIDE] == 0).all()
    rig.actor.zero_grad()
    output.log_probs.sum().backward()
    grad = rig.actor.model.lm_head.weight.grad
    first = rig.actor.drawing.first
    assert grad[first : first + 64].abs().sum() > 0 and not grad[:first].any()
    assert all(each.grad is None for each in rig.actor.model.model.vqmodel.parameters())


def test_an_exported_model_draws_the_same_in_transformers(rig, tmp_path):
    model, drawing = rig.actor.model, rig.actor.drawing
    engine = TrainEngine(SimpleNamespace(module=rig.actor), zero_stage=0, max_norm=1.0)
    export_hf(model, rig.checkpoint.processor, tmp_path, gathered_state_dict(engine, keep=True))
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path)
    rollout = rig.stage.generate(prompts(rig), GREEDY)[0]
    text = rollout.prompt.text.partition("<|image start|>")[0]
    asked = rig.checkpoint.processor(text=text, return_for_image_generation=True, image_area=32 * 32)
    assert list(asked["input_ids"][0]) == rollout.prompt.token_ids and list(asked["image_sizes"][0]) == [SIDE, SIDE]
    ids = torch.tensor([rollout.prompt.token_ids])
    codes = list(range(drawing.first, drawing.first + 64))

    def allowed(_, sequence):
        return [drawing.row_end] if drawing.ends_row(len(sequence) - ids.shape[1]) else codes

    theirs = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=drawing.tokens,
        guidance_scale=3.0,
        negative_prompt_ids=drawing.without_prompt(ids),
        negative_prompt_attention_mask=torch.ones_like(ids),
        prefix_allowed_tokens_fn=allowed,
    )
    assert theirs[0, ids.shape[1] :].tolist() == rollout.token_ids
    assert stock.generate(ids[:, :4], attention_mask=torch.ones(1, 4).long(), max_new_tokens=2).shape[1] > 4


def test_the_half_without_the_prompt_keeps_the_size_of_the_image(rig):
    drawing, tokenizer = rig.actor.drawing, rig.checkpoint.tokenizer
    ids = torch.tensor(rig.stage.generate(prompts(rig), GREEDY)[2].prompt.token_ids)
    kept = drawing.without_prompt(torch.stack([ids, ids]))[1]
    assert tokenizer.decode(kept).replace("<|endoftext|>", "") == "<|image start|>4*4<|image token|>"


def test_adapters_leave_the_vq_model(rig):
    actor = actor_of(rig.checkpoint, wrap=lambda transformer: add_lora(transformer, ModelConfig(lora_rank=2)))
    adapted = [name for name, _ in actor.named_parameters() if "lora_" in name]
    assert adapted and not any("vqmodel" in name for name in adapted)


def seen(rig: Rig) -> PromptBatch:
    """Text alone, images of several sizes, and a prompt to draw."""
    batch = prompts_for(rig.checkpoint)
    return PromptBatch.of([*batch.prompts, prompts(rig).prompts[0]], [*batch.images, []])


@pytest.mark.parametrize("training", [False, True])
def test_what_is_read_is_scored_as_sampled(rig, training):
    rig.actor.train(training)  # batch norms of the VQ model would read an image otherwise in training
    averages = {name: value.clone() for name, value in rig.actor.model.model.vqmodel.named_buffers()}
    rollouts = rig.stage.generate(seen(rig), GUIDED)
    check_replay(rig, rollouts, GUIDED)
    rig.actor.eval()
    now = dict(rig.actor.model.model.vqmodel.named_buffers())
    assert averages and all(torch.equal(value, now[name]) for name, value in averages.items())


def test_images_become_the_codes_of_transformers(rig):
    stock = AutoModelForImageTextToText.from_pretrained(rig.checkpoint.path)
    batch = PromptBatch.of(
        [turn(f"<image>{text}") for text in ("what?", "where?")], [[picture(1, 90, 70)], [picture(2)]]
    )
    for rollout in rig.stage.generate(batch, PLAIN)[::2]:
        inputs = rig.checkpoint.processor(text=rollout.prompt.text, images=rollout.prompt.images, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == rollout.prompt.token_ids
        ours = rig.actor.backbone.hidden_states(inputs_of(rig.checkpoint, [rollout]))[: len(rollout.prompt.token_ids)]
        theirs = stock.model(**inputs).last_hidden_state[0]
        assert (ours - theirs).abs().max() <= 1e-4
        rows, columns = rollout.prompt.vision.get("image_grid_thw")[0, 1:].tolist()
        counted = rig.checkpoint.family.image_token_counts(rig.checkpoint.processor, [rollout.prompt.images[0].size])
        assert (
            counted == [rows * (columns + 1)] == [rollout.prompt.token_ids.count(rig.checkpoint.family.image_token_id)]
        )


def test_an_image_has_the_same_codes_whatever_stands_beside_it(rig):
    images = picture(1, 90, 70), picture(2, 60, 120)
    batch = PromptBatch.of([turn("<image>what?"), turn("<image><image>what?")], [[images[0]], [*images]])
    alone, both = (inputs_of(rig.checkpoint, [rollout]) for rollout in rig.stage.generate(batch, PLAIN)[::2])
    family = rig.actor.backbone.family
    codes = [family.arguments(each, family.token_types(each.sequences))["input_ids"] for each in (alone, both)]
    own, other = (ids[family.token_types(each.sequences) == 1] for ids, each in zip(codes, (alone, both)))
    assert torch.equal(own, other[: len(own)]) and len(other) > len(own)


def test_codes_that_are_missing_are_named(rig):
    rollouts = rig.stage.generate(PromptBatch.of([turn("<image>what?")], [[picture(0)]]), PLAIN)[:1]
    inputs = inputs_of(rig.checkpoint, rollouts)
    (sample,) = inputs.vision.samples
    fewer = {"pixel_values": sample["pixel_values"][:-7], "image_grid_thw": torch.tensor([[1, 6, 7]])}
    inputs.vision = VisionTensors([fewer])
    with pytest.raises(DataError, match=r"sample \d+ has 56 image tokens, its images have 48 features"):
        rig.score(inputs, PLAIN.scoring)


def test_what_it_cannot_do_is_refused(rig, monkeypatch):
    edit = PromptBatch.of([turn("<image>bluer") + "<|image start|>4*4<|image token|>"], [[picture(0)]])
    with pytest.raises(DataError, match="prompt 0: the prompt asks for an image and brings 1"):
        rig.stage.generate(edit, PLAIN)
    with pytest.raises(ConfigError, match="Emu3's processor reads them from preprocessor_config.json alone"):
        Emu3.processor_arguments(None, 100)
    with pytest.raises(DataError, match="prompt 0: the prompt asks for an image by '6\\*6.*this model draws squares"):
        rig.stage.generate(PromptBatch.of([turn("a circle") + "<|image start|>6*6<|image token|>"]), PLAIN)
    config = type(rig.checkpoint.config)(**rig.checkpoint.config.to_dict())
    config.image_area *= 4
    with pytest.raises(ConfigError, match="image_area is 4096 in this Emu3 checkpoint's config.json and 1024 in its"):
        Emu3(config).check_processor(rig.checkpoint.processor)
    with monkeypatch.context() as patched:
        patched.setattr(rig.checkpoint.processor, "bos_token", None)
        with pytest.raises(ConfigError, match="tokenizer of this Emu3 checkpoint has no bos_token"):
            rig.checkpoint.family.check_processor(rig.checkpoint.processor)
    config.vq_config.channel_multiplier = [1, 1, 1]
    with pytest.raises(ConfigError, match="VQ model is 4 pixels wide, its processor counts 8 and resizes images to"):
        Emu3(config).check_processor(rig.checkpoint.processor)
    config.vocabulary_map = {name: number for name, number in config.vocabulary_map.items() if "000063" not in name}
    with pytest.raises(ConfigError, match="visual tokens of this Emu3 checkpoint are not 64 ids in order"):
        Emu3(config)
    config.vocabulary_map = None
    with pytest.raises(ConfigError, match="vocabulary_map of this Emu3 checkpoint's config.json lacks"):
        Emu3(config)
