"""Reward FL's gradient is the derivative of the reward, and goes only where it is said to go."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightrft_visual.algorithms.diffusion.context import LossContext
from lightrft_visual.algorithms.diffusion.reward_fl import DifferentiableScore, RewardFL
from lightrft_visual.config.algorithm import DiffusionAlgorithmConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.layers import flow_match_schedule


class TwoExperts(nn.Module):
    """A velocity of one weight matrix per noise range, and a decoder that is not linear; fp64."""

    def __init__(self, boundary=500.0):
        super().__init__()
        torch.manual_seed(0)
        self.high, self.low = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.boundary, self.calls = boundary, []

    def forward(self, latents, timesteps, conditions, guidance_scale):
        self.calls.append(torch.is_grad_enabled())
        expert = self.high if timesteps[0] >= self.boundary else self.low
        return torch.tanh(expert(latents) + timesteps[:, None].double() / 1000)

    trained = ("high", "low")

    def trains_at(self, timestep):
        return ("high" if timestep >= self.boundary else "low") in self.trained

    def decode(self, latents):
        return torch.sigmoid(latents)


def reward(media):
    return DifferentiableScore(media.square().mean(dim=1) + media[:, 0], torch.tensor([True, True, False]))


def latents():
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


SCORED = {"reward_fl_weight": 0.7, "score_mean": 0.2, "score_std": 1.3}


def reward_fl(num_steps=8, **settings):
    """By these settings of the algorithm."""
    own = DiffusionAlgorithmConfig(**{"beta": 0.0} | settings)
    sampling = SimpleNamespace(guidance_scale=1.0, num_steps=num_steps)
    return RewardFL(SimpleNamespace(algorithm=own, sampling=sampling, offline=False))


def loss_of(model, settings, start=None, schedule=None):
    start = latents() if start is None else start
    return settings.loss(LossContext(model, model), start, {}, schedule or SCHEDULE, reward, 2)


SCHEDULE = flow_match_schedule(8)


def test_gradient_equals_finite_differences():
    model = TwoExperts(boundary=10_000.0)  # one expert for all steps
    settings = reward_fl(mid_timestep=5, **SCORED)
    with torch.no_grad():  # the state before the steps that carry gradient, with the weights as they are
        x = latents()
        for step in range(5):
            at = SCHEDULE[0][step].expand(3)
            x = x + model(x, at, {}, 1.0) * float(SCHEDULE[1][step + 1].double() - SCHEDULE[1][step].double())
    late = (SCHEDULE[0][5:], SCHEDULE[1][5:])
    tail = reward_fl(3, mid_timestep=0, final_timestep=2, **SCORED)
    loss_of(model, settings).loss.backward()
    gradient = model.low.weight.grad.clone()
    for row, column in ((0, 0), (2, 1), (3, 3)):
        values = []
        for shift in (1e-5, -1e-5):
            with torch.no_grad():
                model.low.weight[row, column] += shift
                values.append(loss_of(model, tail, x, late).loss.item())
                model.low.weight[row, column] -= shift
        assert gradient[row, column].item() == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-6)


def test_steps_before_mid_run_without_gradient_and_the_last_one_is_final():
    model = TwoExperts()
    loss_of(model, reward_fl(mid_timestep=3, final_timestep=5))
    assert model.calls == [False] * 3 + [True] * 3


def test_the_distance_to_the_reference_is_a_mean_over_the_steps_with_gradient():
    def velocity(x, *rest):
        return torch.full_like(x, 3.0 if torch.is_grad_enabled() else 1.0)  # the reference is asked without gradient

    context = LossContext(velocity, SimpleNamespace(reference=nullcontext, trains_at=lambda timestep: True))
    assert reward_fl(beta=0.1).denoise(context, latents(), {}, *SCHEDULE)[1].tolist() == [4.0] * 3


@pytest.mark.parametrize("trained", ("high", "low"))
def test_only_steps_of_the_expert_under_training_carry_gradient(trained):
    model = TwoExperts(boundary=550.0)  # sigmas 1, .875, .75, .625 | .5 ...
    model.trained = (trained,)
    loss_of(model, reward_fl(mid_timestep=0)).loss.backward()
    moved = {name for name in ("high", "low") if getattr(model, name).weight.grad is not None}
    assert moved == {trained}


def test_an_invalid_sample_gives_no_gradient_and_is_in_no_mean():
    """Its score may be no number."""
    start, (scores, valid) = latents().requires_grad_(True), reward(torch.ones(3, 4))
    unknown = DifferentiableScore(torch.where(valid, scores, torch.nan), valid)
    outcome = reward_fl().loss(LossContext(TwoExperts(), TwoExperts()), start, {}, SCHEDULE, lambda media: unknown, 2)
    assert float(outcome.means["reward"]) == 2.0
    outcome = loss_of(TwoExperts(), reward_fl(), start)
    outcome.loss.backward()
    assert start.grad[:2].abs().sum() > 0 and not start.grad[2].any()


def test_samples_of_which_none_is_valid_give_a_zero_gradient_with_scores_that_have_none():
    model = TwoExperts()
    nothing = DifferentiableScore(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    outputs = reward_fl(mid_timestep=5).loss(
        LossContext(model, model), latents(), {}, SCHEDULE, lambda media: nothing, 3
    )
    outputs.loss.backward()
    assert outputs.loss == 0 and not any(each.grad.any() for each in model.low.parameters())


def test_an_invalid_score_without_a_finite_derivative_leaves_the_others_gradient_finite():
    def unbounded(media):
        return DifferentiableScore(media.mean(dim=1) / torch.tensor([1.0, 0.0]), torch.tensor([True, False]))

    model = TwoExperts()
    context = LossContext(model, model)
    reward_fl(mid_timestep=5).loss(context, latents()[1:], {}, SCHEDULE, unbounded, 2).loss.backward()
    assert all(each.grad.isfinite().all() and each.grad.any() for each in model.low.parameters())


def test_images_that_reach_the_target_have_no_gradient_and_are_counted():
    model, start = TwoExperts(), latents().requires_grad_(True)
    with torch.no_grad():
        final = reward_fl().denoise(LossContext(model, model), start, {}, *SCHEDULE)[0]
    scores = reward(model.decode(final)).scores[:2]  # the third is invalid
    settings = reward_fl(score_target=scores.mean().item())
    outcome = loss_of(model, settings, start)
    outcome.loss.backward()
    better, worse = scores.argmax(), scores.argmin()
    assert not start.grad[better].any() and start.grad[worse].abs().sum() > 0
    assert float(outcome.means["target_share"]) == pytest.approx(0.5)
    assert outcome.loss.item() == pytest.approx(-(settings.settings.score_target + scores[worse].item()) / 2)


def test_steps_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="final_timestep"):
        reward_fl(mid_timestep=8, final_timestep=8).denoise(None, latents(), {}, *SCHEDULE)
