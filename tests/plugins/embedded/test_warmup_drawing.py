"""The embedded diffusion models: tokenizers that know the captions, settings that decide the weights, stock folders."""

import dataclasses

import pytest
import torch
from diffusers import StableDiffusionPipeline

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.opening import adapter_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy
from lightrft_visual.models.tiny.diffusion import (
    TEXT_LENGTH,
    build_clip_tokenizer,
    build_pipeline,
    build_sd15_pipeline,
    build_t5_tokenizer,
)
from lightrft_visual.plugins.embedded.drawn_shapes import all_captions
from lightrft_visual.plugins.embedded.resolve import resolve_pipeline
from lightrft_visual.plugins.embedded.warmup_drawing import (
    EmbeddedSD3Settings,
    EmbeddedSD15Settings,
    embedded_pipeline,
    encode_clip_captions,
    fold_shift,
    optimise,
    spoil_captions,
    warm_up_vae,
)

SHORT = {"vae_steps": 2, "batch_size": 4, "pictures": 8}
SD3 = EmbeddedSD3Settings(transformer_steps=2, layers=2, **SHORT)
SD15 = EmbeddedSD15Settings(unet_channels=(16, 16), unet_steps=2, **SHORT)


def test_every_caption_is_one_token_a_word_in_both_tokenizers():
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    seen = set()
    for caption in all_captions():
        ids = clip(caption.text, padding="max_length", max_length=TEXT_LENGTH).input_ids
        assert len(ids) == 5 and ids[0] == clip.bos_token_id and ids[-1] == clip.eos_token_id
        assert clip.decode(ids, skip_special_tokens=True) == caption.text
        assert len(t5(caption.text).input_ids) == 4 and t5.unk_token_id not in t5(caption.text).input_ids
        seen.add(tuple(ids))
    assert len(seen) == len(all_captions())


def test_latents_are_normalised_after_the_warm_up():
    settings = EmbeddedSD3Settings(vae_steps=3)
    pipeline = build_pipeline(settings)
    warm_up_vae(pipeline.vae, settings, torch.Generator().manual_seed(0))
    assert pipeline.vae.config.scaling_factor != 1.0
    posterior = pipeline.vae.encode(torch.zeros(1, 3, 32, 32)).latent_dist
    assert posterior.std.max() < 1e-3


def test_spoilt_captions_have_their_share():
    settings = EmbeddedSD3Settings(wrong_shape=0.4, wrong_colour=0.0, no_caption=0.1)
    colours, shapes = torch.zeros(20_000, dtype=torch.long), torch.zeros(20_000, dtype=torch.long)
    said = spoil_captions(colours, shapes, settings, torch.Generator().manual_seed(0))
    assert abs((said == 24).float().mean() - 0.1) < 0.01
    assert abs((said == 0).float().mean() - 0.9 * 0.7) < 0.02  # a random other shape is the right one in a quarter


def test_the_warm_up_says_how_far_it_is(capsys):
    weight = torch.nn.Parameter(torch.ones(2))
    optimise(iter([weight]), lambda: weight.square().sum(), 401, 1e-3, "warm-up, nothing")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "warm-up, nothing step 400/401", "warm-up, nothing step 401/401",
    ]  # fmt: skip
    assert all("loss 1." in line for line in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return embedded_pipeline(SD15, tmp_path_factory.mktemp("cache"))


def test_the_folder_is_cached_by_its_settings(tmp_path):
    folder = embedded_pipeline(SD3, tmp_path)
    stamp = (folder / "model_index.json").stat().st_mtime_ns
    assert embedded_pipeline(SD3, tmp_path) == folder
    assert (folder / "model_index.json").stat().st_mtime_ns == stamp
    assert embedded_pipeline(dataclasses.replace(SD3, seed=1), tmp_path) != folder


def test_the_stock_pipeline_opens_the_folder_and_the_policy_reads_it_as_a_ddim_model(folder):
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline("a red circle", num_inference_steps=2, guidance_scale=1.0).images[0].size == (32, 32)
    policy = DiffusionPolicy.from_pretrained(str(folder), family="sd15")
    assert policy.family.prediction == "epsilon"
    assert policy.encode_prompts(["a red circle"])["context"].shape == (1, TEXT_LENGTH, SD15.text_width)
    assert not adapter_of(str(folder)).takes_first_frame


def test_another_family_has_no_embedded_model():
    with pytest.raises(ConfigError, match="no embedded model of family flux"):
        resolve_pipeline("embedded", "flux")


@torch.no_grad()
def test_folding_the_shift_changes_no_picture():
    vae = build_sd15_pipeline(SD15).vae
    pictures = torch.rand(2, 3, 32, 32)
    before = vae.encode(pictures).latent_dist.mean
    decoded = vae.decode(before).sample
    vae.register_to_config(shift_factor=0.7)
    fold_shift(vae)
    after = vae.encode(pictures).latent_dist.mean
    torch.testing.assert_close(after, before - 0.7, rtol=0, atol=1e-5)
    torch.testing.assert_close(vae.decode(after).sample, decoded, rtol=0, atol=1e-5)
    assert vae.config.shift_factor == 0.0


def test_captions_differ_in_the_encoder():
    context = encode_clip_captions(build_sd15_pipeline(SD15))
    assert len({tuple(row.flatten().tolist()) for row in context}) == len(context) == 25
