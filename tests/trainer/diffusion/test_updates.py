"""Samples whose advantage is 0 are left out of an update, which stays the same."""

from __future__ import annotations

import pytest
import torch

from lightrft_visual.algorithms.diffusion.context import LossContext
from lightrft_visual.algorithms.diffusion.flow_grpo import FlowGRPO
from lightrft_visual.algorithms.diffusion.rows import experience_of
from lightrft_visual.batches.diffusion_sampling import DiffusionBatch, NoiseConfig, SamplingConfig
from lightrft_visual.config import registry
from lightrft_visual.embedded.tiny_sd3 import TEXT_LENGTH, TinyDiffusionSettings, build_pipeline
from lightrft_visual.models.diffusion.policy import DiffusionPolicy, LoraSettings, family_of
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.replay.buffer import NaiveReplayBuffer
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler, sample_generators
from lightrft_visual.trainer.diffusion.updates import ReplayUpdate, without_zero_advantages

COUNT = 6


class Gradients:
    """In the place of the train engine: adds up gradients and counts forwards."""

    def __init__(self, policy):
        self.policy, self.samples, self.lasts = policy, 0, []

    def __call__(self, latents, *rest):
        self.samples += len(latents)
        return self.policy(latents, *rest)

    def accumulate(self, loss, last):
        loss.backward()
        self.lasts.append(last)

    def step(self):
        found = [parameter.grad.clone() for parameter in self.policy.trainable_parameters()]
        self.policy.zero_grad()
        return found


def filled_buffer(policy, advantages):
    conditions = policy.encode_prompts(["a red circle", "a blue cross"] * (COUNT // 2))
    batch = DiffusionBatch(conditions, policy.latent_shape(32, 32), COUNT)
    sampler = DiffusionSampler(SamplingConfig(3, trajectory="sde"), NoiseConfig())
    result = sampler.sample(policy, batch, generator=sample_generators(1, 0, range(COUNT)))
    ids = torch.arange(COUNT)
    experience = experience_of(result, conditions, group_id=ids % 2, sample_id=ids)
    experience.advantages = torch.tensor(advantages)
    experience.valid = torch.tensor([True] * (COUNT - 1) + [False])
    buffer = NaiveReplayBuffer(2)
    buffer.append(experience)
    return buffer


def trained(policy, buffer, skip, steps_per_forward=1):
    engine, metrics = Gradients(policy), MetricsAccumulator()
    algorithm, loss = registry.diffusion_algorithms["flow_grpo"], FlowGRPO(clip_range=0.1)
    update = ReplayUpdate(engine, algorithm, loss, 1.0, "first", steps_per_forward)
    (planned,), left_out = buffer.plan(0), 0
    if skip:
        planned, left_out = without_zero_advantages(buffer, planned)
    batches = [buffer.load(each) for each in planned]
    return update.step(batches, LossContext(engine, policy), 0, metrics, True, left_out), engine


def policy():
    torch.manual_seed(0)
    made = DiffusionPolicy(family_of(build_pipeline(TinyDiffusionSettings(layers=1)), TEXT_LENGTH), LoraSettings(2, 4))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return made


def test_the_gradient_stays_and_the_forwards_go():
    drawing = policy()
    buffer = filled_buffer(drawing, [1.0, 0.0, -0.5, 0.0, 0.0, 0.0])
    whole, every = trained(drawing, buffer, False)
    part, some = trained(drawing, buffer, True)
    assert every.samples == COUNT * 2 and some.samples == 2 * 2 and some.lasts == [False, True]
    assert any(gradient.any() for gradient in whole)
    for one, other in zip(whole, part):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-8)


def test_an_update_without_any_advantage_still_steps():
    drawing = policy()
    gradients, engine = trained(drawing, filled_buffer(drawing, [0.0] * COUNT), True)
    assert engine.lasts[-1] and engine.samples == 2 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("together", [2, 5])
def test_steps_that_share_a_forward_give_the_same_gradient(together):
    drawing = policy()
    buffer = filled_buffer(drawing, [1.0, 0.3, -0.5, 2.0, 0.0, -1.0])
    alone, one = trained(drawing, buffer, False)
    joined, several = trained(drawing, buffer, False, together)
    assert len(one.lasts) == 2 * len(several.lasts) and several.samples == one.samples
    assert several.lasts == [False] * (len(several.lasts) - 1) + [True]
    for each, other in zip(alone, joined):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-8)
