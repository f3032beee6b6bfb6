"""GLM-Image: tokens by its autoregressive half, from which the diffusion half draws."""

import pytest
import tiny_families
import torch
from diffusers import DiffusionPipeline

from lightrft_visual.algorithms.diffusion.context import LossContext
from lightrft_visual.algorithms.diffusion.rows import DenoisingBatch, experience_of, samples_at
from lightrft_visual.algorithms.diffusion.token_grpo import TokenGRPO
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.conditions import joined
from lightrft_visual.experience.diffusion_sampling import SamplingResult
from lightrft_visual.experience.items import make_experience_batch, split_experience_batch
from lightrft_visual.models.diffusion.families.glm_image import OwnNoise
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings, family_of

PROMPTS = ["a red circle", 'a blue cross and a shop called "red"']


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


def token_policy(lora=0):
    policy = DiffusionPolicy(
        family_of(build(), 20), LoraSettings(rank=lora, alpha=4), trainable=("vision_language_encoder",)
    )
    with torch.no_grad():
        for name, weight in policy.family.pipeline.vision_language_encoder.named_parameters():
            if "lora" not in name:
                weight *= 4
    return policy


def experience(policy):
    known = [policy.encode_prompts([prompt]) for prompt in PROMPTS]
    first = policy.first_half(PROMPTS, [1, 2], 32, 64, count=2)
    conditions = {name: joined([each[name] for each in known]) for name in known[0]} | first
    result = SamplingResult(torch.zeros(2, *policy.latent_shape(32, 64)), torch.ones(1), torch.ones(1))
    ids = torch.arange(2)
    made = experience_of(result, conditions, group_id=ids, sample_id=ids)
    made.advantages = torch.tensor([1.0, -1.0])
    return make_experience_batch(split_experience_batch(made)[::-1])


@pytest.mark.parametrize("lora", [0, 2])
def test_tokens_are_replayed_and_trained_and_the_diffusion_half_is_not(lora, tmp_path):
    policy = token_policy(lora)
    policy.keep_reference()
    assert all("vision_language_encoder" in name for name, each in policy.named_parameters() if each.requires_grad)
    rows = samples_at(experience(policy), torch.zeros(2, dtype=torch.long))
    drawn = rows.conditions["drawn"]
    assert drawn.shape[:2] == (2, 1) and drawn.shape[2] > 2 and int(drawn.max()) < tiny_families.GLM_CODES
    outcome = TokenGRPO(clip_range=0.2, beta=0.1).loss(LossContext(policy, policy), rows, 2)
    assert outcome.maxima["logp_diff_max"] < 5e-6 and outcome.means["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert outcome.means["kl"] == pytest.approx(0, abs=1e-6)
    outcome.loss.backward()
    before = policy.family.token_log_probs(rows.conditions).mean(dim=1).detach()
    gradients = [each.grad for each in policy.trainable_parameters() if each.grad is not None]
    norm = sum(float(each.square().sum()) for each in gradients) ** 0.5
    torch.optim.SGD(policy.trainable_parameters(), lr=0.01 / norm).step()
    with torch.no_grad():
        after = policy.family.token_log_probs(rows.conditions).mean(dim=1)
        assert float(((after - before) * rows.advantages).sum()) > 0  # what the loss is, to first order
        with policy.reference():
            torch.testing.assert_close(policy.family.token_log_probs(rows.conditions).mean(dim=1), before)
    if lora:
        policy.save_lora(tmp_path)
        stock = token_policy().family.pipeline
        stock.vision_language_encoder.load_adapter(tmp_path / "vision_language_encoder")
    else:
        policy.save_pretrained(tmp_path)
        stock = DiffusionPipeline.from_pretrained(tmp_path)
    family = family_of(stock, 20)
    with torch.no_grad():
        torch.testing.assert_close(family.token_log_probs(rows.conditions).mean(dim=1), after, rtol=1e-5, atol=1e-6)


def test_one_half_is_trained_at_a_time_and_other_models_have_one():
    with pytest.raises(ConfigError, match="one of the two halves at a time"):
        DiffusionPolicy(family_of(build(), 20), trainable=("transformer", "vision_language_encoder"))
    with pytest.raises(ConfigError, match="has no autoregressive half"):
        family_of(tiny_families.z_image(), 20).first_half(["a"], [1], 32, 32)


def test_token_loss_by_hand():
    ratios, advantages = torch.tensor([[1.5, 0.9], [1.5, 0.5]]), torch.tensor([2.0, -1.0])
    old = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]])
    shape = torch.zeros(2, 1)
    numbers = ("timesteps", "sigma", "sigma_next", "log_probs", "sample_id", "group_id", "steps")
    rows = DenoisingBatch(
        **dict.fromkeys(("x", "x_next", "data"), shape), **dict.fromkeys(numbers, shape[:, 0]), advantages=advantages,
        valid=torch.tensor([True, True]), conditions={"drawn_log_probs": old[:, None]}, schedule=shape,
    )  # fmt: skip
    context = LossContext(lambda *_, tokens: old + ratios.log(), None)
    found = TokenGRPO(clip_range=0.2).loss(context, rows, 4.0).loss
    by_hand = (-(1.2 * 2 + 0.9 * 2) / 2 + (1.5 + 0.8) / 2) / 4
    assert float(found) == pytest.approx(by_hand)
