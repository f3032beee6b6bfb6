"""From a rollout over the replay buffer to training rows, with nothing lost."""

import pytest
import torch

from lightrft_visual.algorithms.diffusion.denoising_batch import (
    batch_at,
    experience_of,
    grouped_steps,
    noisy_steps,
    random_share,
    samples_at,
    shuffled_steps,
    trainable_steps,
)
from lightrft_visual.experience.diffusion_sampling import SamplingResult
from lightrft_visual.experience.items import make_experience_batch, split_experience_batch
from lightrft_visual.trainer.diffusion.updates import step_slices


def rollout(count=4, steps=5, ode=False):
    generator = torch.Generator().manual_seed(0)
    path = torch.randn(count, steps + 1, 2, 3, 3, generator=generator)
    sigmas = torch.linspace(1, 0.2, steps)
    stochastic = torch.tensor([False, True, True, True, False])
    log_probs = torch.randn(count, steps, generator=generator) * stochastic
    result = SamplingResult(path[:, -1], sigmas * 1000, sigmas)
    if not ode:
        result = SamplingResult(path[:, -1], sigmas * 1000, sigmas, path, log_probs, stochastic, path[:, 1:])
    conditions = {"context": torch.randn(count, 2, 4, generator=generator)}
    return experience_of(result, conditions, group_id=torch.arange(count) // 2, sample_id=torch.arange(count))


def test_trainable_steps_are_the_stochastic_ones_and_the_first_share_of_them():
    experience = rollout()
    assert trainable_steps(experience).tolist() == [[1, 2, 3]] * 4
    assert trainable_steps(experience, 0.67).tolist() == [[1, 2]] * 4
    assert trainable_steps(experience, 0.01).tolist() == [[1]] * 4


def test_shuffling_keeps_every_step_once():
    steps = trainable_steps(rollout())
    shuffled = shuffled_steps(steps, torch.arange(4), 0)
    assert torch.equal(shuffled.sort(dim=1).values, steps) and not torch.equal(shuffled, steps)
    assert torch.equal(shuffled_steps(steps[2:], torch.tensor([2, 3]), 0), shuffled[2:])  # in any company


def test_a_random_share_differs_from_sample_to_sample():
    shuffled = shuffled_steps(torch.arange(10).expand(64, -1), torch.arange(64), 0)
    kept = random_share(shuffled, 0.3)
    assert kept.shape == (64, 3) and all(len(set(row)) == 3 for row in kept.tolist())
    assert torch.bincount(kept.flatten(), minlength=10).min() > 5 and random_share(shuffled, 0.01).shape == (64, 1)


def test_steps_of_one_expert_come_together():
    steps = torch.tensor([[3, 0, 2, 1], [0, 1, 2, 3]])
    assert grouped_steps(steps, (steps >= 2).long()).tolist() == [[0, 1, 3, 2], [0, 1, 2, 3]]


def test_rows_after_the_replay_buffer():
    experience = rollout()
    experience.advantages = torch.arange(4.0)
    items = split_experience_batch(experience)
    again = make_experience_batch([items[index] for index in (2, 0, 3, 1)])
    order, steps = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 3, 2, 1])
    rows = samples_at(again, steps)
    assert torch.equal(rows.x, experience.latents[order, steps])
    assert torch.equal(rows.x_next, experience.latents[order, steps + 1])
    assert torch.equal(rows.log_probs, experience.log_probs[order, steps])
    assert torch.equal(rows.rollout_means, experience.latents[order, steps + 1])
    assert torch.equal(rows.conditions["context"], experience.prompt_embeds["context"][order])
    assert rows.advantages.tolist() == [2.0, 0.0, 3.0, 1.0] and rows.sample_id.tolist() == order.tolist()
    assert torch.equal(rows.sigma, experience.sigmas[0, steps])
    assert torch.equal(rows.sigma_next, experience.sigmas[0, steps + 1])


def test_rows_of_an_ode_rollout_hold_the_finished_latents():
    experience = rollout(ode=True)
    assert experience.latents.shape == (4, 1, 2, 3, 3)
    rows = samples_at(experience, torch.tensor([0, 1, 2, 4]))
    assert torch.equal(rows.data, experience.latents[:, 0]) and torch.equal(rows.x, rows.data)
    assert rows.sigma_next.tolist()[-1] == 0.0


@pytest.mark.parametrize("last,expected", ((0.2, [0, 1, 2, 3, 4]), (0.0, [0, 1, 2, 3])))
def test_losses_on_data_train_at_every_step_that_has_noise(last, expected):
    experience = rollout(ode=True)
    experience.sigmas[:, -2] = last
    assert noisy_steps(experience).tolist() == [expected] * 4
    assert noisy_steps(experience, 0.5).tolist() == [expected[: len(expected) // 2]] * 4


@pytest.mark.parametrize("ode", [False, True])
def test_rows_at_several_steps_are_those_at_each(ode):
    experience = rollout(ode=ode)
    steps = torch.tensor([[1, 3], [2, 1], [3, 2], [1, 2]])
    rows, alone = batch_at(experience, steps), [samples_at(experience, column) for column in steps.T]
    assert len(rows) == 8 and rows.sample_id.tolist() == [0, 1, 2, 3] * 2
    for name in ("x", "x_next", "sigma", "log_probs", "steps", "valid"):
        assert torch.equal(getattr(rows, name), torch.cat([getattr(each, name) for each in alone])), name
    assert torch.equal(rows.conditions["context"], torch.cat([each.conditions["context"] for each in alone]))
    assert (rows.rollout_means is None) == ode


@pytest.mark.parametrize(
    "experts,together,expected",
    [
        ([0, 0, 0, 0, 0], 2, [(0, 2), (2, 4), (4, 5)]),
        ([0, 0, 0, 1, 1], 4, [(0, 3), (3, 5)]),
        ([0, 1], 1, [(0, 1), (1, 2)]),
        ([0], 8, [(0, 1)]),
    ],
)
def test_a_forward_holds_steps_of_one_expert(experts, together, expected):
    assert step_slices(experts, together) == [slice(*each) for each in expected]
