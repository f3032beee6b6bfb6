"""GLM-Image: tokens by its autoregressive half, from which the diffusion half draws."""

import pytest
import tiny_families
import torch

from lightrft_visual.batches.conditions import joined
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.families.glm_image import OwnNoise
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings, family_of


def build():
    torch.manual_seed(0)
    pipeline = tiny_families.glm_image()
    for name in ("vision_language_encoder", "text_encoder", "transformer"):
        getattr(pipeline, name).eval()
    return pipeline


def test_tokens_depend_on_prompt_and_seed_and_are_codes_of_images():
    policy = DiffusionPolicy(family_of(build(), 20))
    with torch.no_grad():  # random weights say the same whatever came before, and nothing of the prompt
        for weight in policy.family.pipeline.vision_language_encoder.parameters():
            weight *= 4
    prompts = ["a red circle", "a blue cross", "a red circle", "a blue cross"]
    drawn = policy.first_half(prompts, [1, 2, 3, 2], 64, 96, count=3)["prior"]
    assert drawn.shape == (4, 1, 24) and int(drawn.max()) < tiny_families.GLM_CODES
    grid = drawn.view(4, 4, 6)
    assert torch.equal(grid[:, ::2, ::2], grid[:, 1::2, 1::2])  # each token stands for two by two patches
    assert torch.equal(drawn[1], drawn[3]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(policy.first_half(prompts[:1], [1], 64, 96, count=1)["prior"][0], drawn[0])


def test_noise_of_ones_own_samples_the_distribution_of_the_settings():
    settings = build().vision_language_encoder.generation_config
    settings.temperature, settings.top_k, settings.top_p = 0.5, None, 0.9
    scores = torch.tensor([2.0, 1.0, 0.5, -3.0, 9.0]).expand(4000, 5)
    drawn = OwnNoise(settings, 4, list(range(4000)))(torch.zeros(4000, 1, dtype=torch.long), scores).argmax(dim=1)
    found = drawn.bincount(minlength=5) / 4000
    expected = torch.tensor([4.0, 2.0]).softmax(dim=0)  # the third lies outside of top_p, the last is no code
    torch.testing.assert_close(found, torch.tensor([*expected, 0.0, 0.0, 0.0]), atol=0.02, rtol=0)


def test_texts_in_quotes_of_different_lengths_are_drawn_as_each_alone():
    policy = DiffusionPolicy(family_of(build(), 20))
    prompts = ['a sign that says "red"', "a blue cross", 'a shop called "blue cross"']
    known = [policy.encode_prompts([prompt]) for prompt in prompts]
    lengths = [each["context"].shape[1] for each in known]
    assert lengths[1] < lengths[0] < lengths[2]
    first = policy.first_half(prompts, [1, 2, 3], 32, 32, count=3)
    latents, timesteps = torch.randn(3, *policy.latent_shape(32, 32)), torch.tensor([900.0, 500.0, 100.0])
    conditions = {name: joined([each[name] for each in known]) for name in known[0]} | first
    with torch.no_grad():
        together = policy(latents, timesteps, conditions, 1.0)
        for i, each in enumerate(known):
            own = each | {name: value[i : i + 1] for name, value in first.items()}
            alone = policy(latents[i : i + 1], timesteps[i : i + 1], own, 1.0)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)


def test_the_first_half_is_not_trained_and_says_so():
    with pytest.raises(ConfigError, match="autoregressive half draws its tokens in every rollout, and is not trained"):
        DiffusionPolicy(family_of(build(), 20), LoraSettings(), trainable=("vision_language_encoder",))
    with pytest.raises(ConfigError, match="has no autoregressive half"):
        family_of(tiny_families.z_image(), 20).first_half(["a"], [1], 32, 32)
