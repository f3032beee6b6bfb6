"""The experience maker with the `diffusers` engine: prompts in, scored and compared pictures out."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from lightrft_visual.algorithms.diffusion.advantages import group_advantages
from lightrft_visual.config.diffusion import DiffusionAlgorithmConfig, DiffusionSamplingConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.diffusion_sampling import NoiseConfig, SamplingConfig
from lightrft_visual.experience.types import ExperienceDiffusion
from lightrft_visual.models.diffusion.opening import family_of
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings
from lightrft_visual.models.tiny.diffusion import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline
from lightrft_visual.rewards import RewardComputationEngine
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler
from lightrft_visual.runtime.host_copies import to_device
from lightrft_visual.trainer.diffusion.maker import DiffusersEngine
from lightrft_visual.trainer.diffusion.stages import DiffusionSampling, TrainedVelocity
from lightrft_visual.trainer.diffusion.updates import _moved
from lightrft_visual.trainer.fast_exp_maker import FastExperienceMaker, MakerSettings

PROMPTS = ["a red circle", "a blue cross"]


@pytest.fixture(scope="module")
def engine() -> DiffusersEngine:
    pipeline = build_pipeline(TinyDiffusionSettings(layers=1))
    policy = DiffusionPolicy(family_of(pipeline, TEXT_LENGTH), LoraSettings(2, 4))
    pictures = DiffusionSamplingConfig(height=32, width=32, guidance_scale=1.0, micro_rollout_batch_size=3)
    sampler = DiffusionSampler(SamplingConfig(3, trajectory="sde"), NoiseConfig(0.7))
    return DiffusersEngine(DiffusionSampling(TrainedVelocity(policy, policy, False), sampler, pictures, 42), 4)


def redness(images, references, labels):
    """Redness, and a bonus for the reference to show that columns keep to their pictures."""
    assert [label == "circles" for label in labels] == [reference == 1.0 for reference in references]
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 + bonus for image, bonus in zip(images, references)]


def maker_of(engine: DiffusersEngine, **settings) -> FastExperienceMaker:
    rewards = RewardComputationEngine(custom_reward_func=redness)
    settings = MakerSettings(engine=engine, rewards=rewards, **settings)
    return FastExperienceMaker(None, None, None, None, None, 0, None, None, settings=settings)


def test_settings_of_one_maker_stay_as_they_were_for_another_and_rewards_are_given_once(engine):
    settings = MakerSettings(engine=engine)
    first, second = (
        FastExperienceMaker(None, None, None, None, None, 0, None, None, reward_fn=given, settings=settings)
        for given in (lambda images: [1.0] * len(images), lambda images: [2.0] * len(images))
    )
    assert settings.rewards is None and first.rewards is not second.rewards
    settings.rewards = first.rewards
    with pytest.raises(ConfigError, match="settings.rewards scores alone, and reward_fn is given beside it"):
        FastExperienceMaker(None, None, None, None, None, 0, None, None, reward_fn=redness, settings=settings)


def make(maker: FastExperienceMaker) -> list[ExperienceDiffusion]:
    return maker.make_experience_list(PROMPTS, all_references=[1.0, 0.0], all_labels=["circles", "crosses"])


def test_experience_of_all_prompts_with_group_advantages(engine):
    maker = maker_of(engine)
    experiences = make(maker)
    assert [len(each.latents) for each in experiences] == [3, 3, 2]
    assert all(isinstance(each, ExperienceDiffusion) for each in experiences)
    assert torch.cat([each.group_id for each in experiences]).tolist() == [0] * 4 + [1] * 4
    assert torch.cat([each.sample_id for each in experiences]).tolist() == list(range(8))
    rewards = torch.cat([each.info["reward"] for each in experiences])
    assert (rewards[:4] > 1).all() and (rewards[4:] < 1).all() and len(set(rewards.tolist())) > 2
    wanted = group_advantages(rewards, torch.tensor([0] * 4 + [1] * 4), torch.ones(8, dtype=torch.bool))
    assert torch.equal(torch.cat([each.advantages for each in experiences]), wanted)


def test_samples_refer_to_one_copy_of_their_text_on_the_host_which_an_update_moves_once(engine):
    experiences, once = make(maker_of(engine)), cache(partial(to_device, device="meta"))
    moved = [_moved(each, once) for each in experiences]
    for batches, device in ((experiences, "cpu"), (moved, "meta")):
        held = [each["context"] for batch in batches for each in batch.shared_embeds]
        assert len(held) == 8 and len({id(each) for each in held}) == len(PROMPTS)
        assert {each.device.type for each in held} == {device} and not any(batch.prompt_embeds for batch in batches)


def test_noise_follows_the_policy_version_and_the_call(engine):
    maker, later_maker = maker_of(engine), maker_of(engine)
    later_maker.policy_version = 1
    first, second, again, later = make(maker), make(maker), make(maker_of(engine)), make(later_maker)
    assert torch.equal(first[0].latents, again[0].latents)
    assert not torch.equal(first[0].latents, second[0].latents)
    assert not torch.equal(first[0].latents, later[0].latents)
    assert later[0].policy_version.tolist() == [1, 1, 1]


def test_settings_of_the_advantages_are_used_and_those_of_text_refused(engine):
    maker = maker_of(replace(engine, algorithm=DiffusionAlgorithmConfig(adv_clip_max=0.1)))
    assert torch.cat([each.advantages for each in make(maker)]).abs().max() == pytest.approx(0.1)
    assert [each.media.shape[0] for each in maker.generate_samples(PROMPTS)] == [3, 3, 2]  # without rewards
    with pytest.raises(ConfigError, match="temperature"):
        maker.make_experience_list(PROMPTS, temperature=0.5)
