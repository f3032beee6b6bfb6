"""The embedded diffusion model: tokenizers that know the captions, settings that decide the weights."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import torch
from waiting import output_of

from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, build_clip_tokenizer, build_pipeline, build_t5_tokenizer
from lightrft_visual.plugins.embedded.drawn_shapes import all_captions
from lightrft_visual.plugins.embedded.warmup_sd3 import (
    EmbeddedSD3Settings,
    EncodedScenes,
    embedded_diffusion_folder,
    optimise,
    spoil_captions,
    warm_up_vae,
)

PROJECT = Path(__file__).resolve().parents[3]


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


def test_encoded_pictures_keep_their_labels():
    settings = EmbeddedSD3Settings(pictures=300)
    drawn = EncodedScenes.draw(build_pipeline(settings).vae, settings, torch.Generator().manual_seed(0))
    assert drawn.latents.shape == (300, 8, 8, 8) and len(set(zip(drawn.colours.tolist(), drawn.shapes.tolist()))) == 24
    colours, shapes, latents = drawn.some(50, torch.Generator().manual_seed(1))
    for colour, shape, latent in zip(colours, shapes, latents):
        (row,) = (drawn.latents == latent).flatten(1).all(1).nonzero()[:, 0].tolist()
        assert (drawn.colours[row], drawn.shapes[row]) == (colour, shape)


def test_spoilt_captions_have_their_share():
    settings = EmbeddedSD3Settings(wrong_shape=0.4, wrong_colour=0.0, no_caption=0.1)
    colours, shapes = torch.zeros(20_000, dtype=torch.long), torch.zeros(20_000, dtype=torch.long)
    said = spoil_captions(colours, shapes, settings, torch.Generator().manual_seed(0))
    assert abs((said == 24).float().mean() - 0.1) < 0.01
    assert abs((said == 0).float().mean() - 0.9 * 0.7) < 0.02  # a random other shape is the right one in a quarter


RACER = """
import sys, time
from lightrft_visual.models.tiny.diffusion import build_pipeline
from lightrft_visual.plugins.embedded.warmup_sd3 import EmbeddedSD3Settings, built_once

settings = EmbeddedSD3Settings(layers=1)

def build():
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    return build_pipeline(settings)

built_once("raced", settings, build, sys.argv[1])
"""


def test_of_processes_that_race_one_builds_and_the_others_wait(tmp_path):
    counter = tmp_path / "count"
    command = [sys.executable, "-c", RACER, str(tmp_path / "cache"), str(counter)]
    racers = [subprocess.Popen(command, cwd=PROJECT) for _ in range(2)]
    for racer in racers:
        output_of(racer, 400)
    assert [racer.returncode for racer in racers] == [0, 0]
    assert counter.read_text() == "built\n"
    kept = [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
    assert kept == [f"raced-{EmbeddedSD3Settings(layers=1).key}"]


def test_the_warm_up_says_how_far_it_is(capsys):
    weight = torch.nn.Parameter(torch.ones(2))
    (trained,) = optimise(iter([weight]), lambda: weight.square().sum(), 401, 1e-3, "warm-up, nothing")
    lines = capsys.readouterr().out.splitlines()
    assert trained is weight and [line.split("  ")[0] for line in lines] == [
        "warm-up, nothing step 400/401", "warm-up, nothing step 401/401",
    ]  # fmt: skip
    assert all("loss 1." in line for line in lines)


def test_the_cache_is_keyed_by_settings(tmp_path):
    settings = EmbeddedSD3Settings(vae_steps=2, transformer_steps=2, batch_size=4, pictures=8, layers=2)
    folder = embedded_diffusion_folder(tmp_path, settings)
    assert embedded_diffusion_folder(tmp_path, settings) == folder
    assert dataclasses.replace(settings, seed=1).key != settings.key
