"""Models that edit: the stock pipeline's numbers, source images of several sizes, conditions held once a prompt."""

import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as stock_edit
import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as stock_plus
import pytest
import tiny_families
import torch
from PIL import Image
from tiny_families import after_a_step

from lightrft_visual.algorithms.diffusion.denoising_batch import batch_at, experience_of
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.buffer import NaiveReplayBuffer, items_from_state, items_to_state
from lightrft_visual.experience.diffusion_sampling import SamplingResult
from lightrft_visual.experience.items import make_experience_batch, split_experience_batch
from lightrft_visual.experience.vision import stacked
from lightrft_visual.models.diffusion.families import base
from lightrft_visual.models.diffusion.families.base import pack
from lightrft_visual.models.diffusion.families.qwen_image_edit import READ_PIXELS
from lightrft_visual.models.diffusion.families.source_tokens import SOURCE_PIXELS
from lightrft_visual.models.diffusion.opening import family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.runtime import collectives

PIXELS = 64 * 64
SQUARE, WIDE = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (80, 20), "blue")


def policy_of(name, lora=2):
    family = family_of(tiny_families.pipeline_of(name))
    family.source_pixels = PIXELS
    return DiffusionPolicy(family, LoraSettings(rank=lora, alpha=4))


def smaller(monkeypatch):
    """The stock pipelines scale source images to PIXELS as well; by themselves they take a megapixel."""
    original = stock_edit.calculate_dimensions
    monkeypatch.setattr(stock_edit, "calculate_dimensions", lambda area, ratio: original(PIXELS, ratio))
    assert (stock_plus.VAE_IMAGE_SIZE, stock_plus.CONDITION_IMAGE_SIZE) == (SOURCE_PIXELS, READ_PIXELS)
    for name in ("VAE_IMAGE_SIZE", "CONDITION_IMAGE_SIZE"):
        monkeypatch.setattr(stock_plus, name, PIXELS)


# How the stock pipelines are asked; Kontext would scale source and drawing to a megapixel.
GUIDED = {"negative_prompt": "a dog", "true_cfg_scale": 3.0}
ASKED = {
    "qwen_image_edit": ([WIDE], GUIDED),
    "qwen_image_edit_plus": ([SQUARE, WIDE], GUIDED),
    "flux_kontext": ([WIDE], {"guidance_scale": 3.0, "max_area": 32 * 32, "_auto_resize": False}),
}


@pytest.mark.parametrize("name", ASKED)
def test_after_training_the_saved_pipeline_draws_what_the_policy_draws(name, tmp_path, monkeypatch):
    smaller(monkeypatch)
    policy = policy_of(name, lora=0)
    sources, asked = ASKED[name]
    negative = "a dog" if policy.family.uses_negative else None
    conditions = stacked(policy.encode_edits(["make it red"], [sources], negative), policy.device)
    start = torch.randn(1, *policy.latent_shape(32, 32))
    pipeline, ours = after_a_step(policy, conditions, start, 3.0, 0.1, tmp_path)
    if name == "flux_kontext":
        sources = [policy.family._scaled(image, PIXELS) for image in sources]
    theirs = pipeline(
        sources if len(sources) > 1 else sources[0], "make it red", **asked,
        height=32, width=32, num_inference_steps=3, latents=pack(start), output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_source_images_of_several_sizes_and_numbers_give_what_each_gives_alone(monkeypatch):
    policy = policy_of("qwen_image_edit_plus")
    sources = [[SQUARE], [WIDE], [SQUARE, WIDE], [SQUARE]]
    known = policy.encode_edits(["a", "make it blue", "both", "red"], sources, "")
    latents, timesteps = torch.randn(4, *policy.latent_shape(32, 32)), torch.tensor([900.0, 500.0, 300.0, 100.0])
    with torch.no_grad():
        together = policy(latents, timesteps, stacked(known, policy.device), 3.0)
        for i, each in enumerate(known):
            alone = policy(latents[i : i + 1], timesteps[i : i + 1], stacked([each], policy.device), 3.0)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)

    calls = []
    policy.family.pipeline.transformer.register_forward_hook(lambda *_: calls.append(1))
    first = stacked(known[:1], policy.device)
    alone = policy(latents[:1], timesteps[:1], first, 1.0)
    monkeypatch.setattr(collectives, "all_reduce_max", lambda value: torch.full_like(value, 3.0))
    calls.clear()
    policy(latents[:1], timesteps[:1], first, 1.0)
    assert len(calls) == 1  # with whole weights a rank need not keep step
    monkeypatch.setattr(base, "is_zero_param", lambda weight: True)
    calls.clear()
    beside = policy(latents[:1], timesteps[:1], first, 1.0)
    assert len(calls) == 3 and torch.equal(alone, beside)  # as often as the rank with three sizes


def test_samples_of_a_prompt_hold_one_copy_of_their_images_and_text():
    policy = policy_of("qwen_image_edit")
    known = policy.encode_edits(["red", "blue", "red", "red"], [[SQUARE], [WIDE], [SQUARE.copy()], [WIDE]], None)
    assert known[0] is known[2] and known[1]["source"] is known[3]["source"] and known[0] is not known[3]
    again = policy.encode_edits(["red"], [[SQUARE.copy()]], "")[0]
    assert again["context"] is known[0]["context"] and "negative_context" in again
    ids = torch.arange(4)
    result = SamplingResult(torch.zeros(4, *policy.latent_shape(32, 32)), torch.ones(1), torch.ones(1))
    experience = experience_of(result, {}, group_id=ids, sample_id=ids, shared=known)
    buffer = NaiveReplayBuffer(2)
    buffer.append(experience)
    kept = [item.shared_embeds["source"].untyped_storage().data_ptr() for item in buffer.items]
    assert kept[0] == kept[2] and kept[1] == kept[3] != kept[0]
    batch = make_experience_batch([buffer.items[1], buffer.items[0]])
    rows = batch_at(batch, torch.zeros(2, 1, dtype=torch.long))
    expected = stacked([known[1], known[0]], policy.device)
    assert rows.conditions.keys() == expected.keys()
    assert all(torch.equal(rows.conditions[name], value) for name, value in expected.items())
    stored = items_from_state(items_to_state(split_experience_batch(batch)))
    assert torch.equal(stored[0].shared_embeds["source"], known[1]["source"])


def test_texts_without_images_negative_prompts_and_models_that_edit_nothing_are_refused():
    edit, kontext = policy_of("qwen_image_edit"), policy_of("flux_kontext")
    for told, refused in (
        ("at least one beside each text", lambda: edit.encode_prompts(["a red circle"])),
        ("at least one beside each text", lambda: kontext.encode_prompts(["a red circle"])),
        ("reads no negative prompt", lambda: kontext.encode_edits(["red"], [[SQUARE]], "a dog")),
        (
            "edits no images",
            lambda: DiffusionPolicy(family_of(tiny_families.flux(), 5)).encode_edits(["a"], [[SQUARE]]),
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            refused()
    assert not any("negative" in name for name in kontext.encode_edits(["red"], [[SQUARE]], "")[0])


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_a_text_or_negative_prompt_that_spells_the_mark_of_an_image_is_refused_by_name(name):
    policy = policy_of(name)
    for text, negative in (("make it <|image_pad|> red", None), ("red", "a <|image_pad|>")):
        with pytest.raises(DataError, match=r"the prompt '.*<.image_pad.>.*' holds <.image_pad.>, which this model"):
            policy.encode_edits([text], [[SQUARE]], negative)


def test_kontext_scales_a_source_to_the_trained_size_of_its_proportions():
    """As in the stock pipeline proportions are those of the sides in whole tokens."""
    family = policy_of("flux_kontext").family
    family.source_pixels = None
    narrow, narrower = SQUARE.resize((7, 10)), SQUARE.resize((3, 10))  # 4 by 8 and less
    found = [family._scaled(each, SOURCE_PIXELS).size for each in (SQUARE, WIDE, narrow, narrower)]
    assert found == [(1024, 1024), (1568, 672), (720, 1456), (672, 1568)]
