"""The embedded Stable Diffusion 1.5: a stock pipeline folder, cached, whose latents need no shift."""

import dataclasses

import pytest
import torch
from diffusers import StableDiffusionPipeline

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, adapter_of
from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, build_sd15_pipeline
from lightrft_visual.plugins.embedded.resolve import embedded_folder
from lightrft_visual.plugins.embedded.warmup_sd15 import (
    EmbeddedSD15Settings,
    embedded_sd15_folder,
    encode_clip_captions,
    fold_shift,
)

SETTINGS = EmbeddedSD15Settings(unet_channels=(16, 16), vae_steps=2, unet_steps=2, batch_size=4, pictures=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return embedded_sd15_folder(tmp_path_factory.mktemp("cache"), SETTINGS)


def test_the_stock_pipeline_opens_the_folder(folder):
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline("a red circle", num_inference_steps=2, guidance_scale=1.0).images[0]
    assert picture.size == (32, 32)


def test_the_folder_is_cached_by_its_settings(folder):
    assert embedded_sd15_folder(folder.parent, SETTINGS) == folder
    assert dataclasses.replace(SETTINGS, seed=1).key != SETTINGS.key


def test_the_policy_reads_it_as_a_ddim_model(folder):
    policy = DiffusionPolicy.from_pretrained(str(folder), family="sd15")
    assert policy.prediction == "epsilon"
    assert policy.encode_prompts(["a red circle"])["context"].shape == (1, TEXT_LENGTH, SETTINGS.text_width)
    assert not adapter_of(str(folder)).takes_first_frame


def test_another_family_has_no_embedded_model():
    with pytest.raises(ConfigError, match="no embedded model of family flux"):
        embedded_folder("flux")


@torch.no_grad()
def test_folding_the_shift_changes_no_picture():
    vae = build_sd15_pipeline(SETTINGS).vae
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
    context = encode_clip_captions(build_sd15_pipeline(SETTINGS))
    assert len({tuple(row.flatten().tolist()) for row in context}) == len(context) == 25
