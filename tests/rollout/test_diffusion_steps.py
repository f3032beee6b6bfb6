"""Exact facts about single denoising steps."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.errors import ConfigError
from lightrft_visual.models.diffusion.families.base import EULER_STEPS
from lightrft_visual.rollout.diffusion_sampler import RULES, euler_step, sde_step, transition

NOISELESS_RULES = ("flow_grpo", "dance", "cps")  # reflow always adds its noise


def latents(count=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 2, 4, 4, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("rule", ("flow_grpo", "dance", "reflow", "ddim"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_log_prob_is_that_of_a_normal(rule, reduction):
    x, v, noise = latents(dtype=torch.float64)
    step = sde_step(x, v, 0.8, 0.6, 0.7, rule=rule, noise=noise, reduction=reduction)
    density = torch.distributions.Normal(step.mean, step.std.expand_as(step.mean)).log_prob(step.prev).flatten(1)
    expected = density.mean(1) if reduction == "mean" else density.sum(1)
    torch.testing.assert_close(step.log_prob, expected, rtol=1e-12, atol=1e-12)


def test_cps_surrogate_is_minus_the_squared_distance():
    x, v, noise = latents(dtype=torch.float64)
    step = sde_step(x, v, 0.8, 0.6, 0.7, rule="cps", noise=noise)
    std = 0.6 * math.sin(0.7 * math.pi / 2)
    torch.testing.assert_close(step.log_prob, -(std**2) * noise.square().flatten(1).mean(1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("rule", NOISELESS_RULES)
@given(st.floats(0.05, 1.0), st.floats(0.01, 0.99), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_without_noise_the_step_is_the_euler_step_bit_for_bit(rule, sigma, share, seed):
    x, v, _ = latents(seed=seed)
    mean, std = transition(x, v, sigma, sigma * share, 0.0, rule=rule)
    assert torch.equal(mean, euler_step(x, v, sigma, sigma * share))
    assert not std.any()


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_step_is_scored_exactly_a_scalar_sigma_is_that_of_all_samples_and_bf16_is_stepped_in_fp32(rule):
    given = x, v, noise = latents()
    sigma, sigma_next = torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.7, 0.4, 0.1])
    drawn = sde_step(x, v, sigma, sigma_next, 0.5, rule=rule, noise=noise)
    scored = sde_step(x, v, sigma, sigma_next, 0.5, rule=rule, prev_sample=drawn.prev)
    assert torch.equal(drawn.log_prob, scored.log_prob)
    one = sde_step(x, v, 0.8, 0.6, 0.5, rule=rule, noise=noise)
    many = sde_step(x, v, torch.full((3,), 0.8), torch.full((3,), 0.6), 0.5, rule=rule, noise=noise)
    for left, right in zip(one, many):
        torch.testing.assert_close(left, right)
    x, v, noise = (tensor.bfloat16() for tensor in given)
    step = sde_step(x, v, 0.8, 0.6, 0.5, rule=rule, noise=noise)
    assert step.prev.dtype == step.log_prob.dtype == torch.float32


@pytest.mark.parametrize(
    ("rule", "level", "wanted", "deviation"),
    [
        # std_t = sqrt(.5/.5) = 1; mean = 2 (1 - .25) + 1 (1 + .5) (-.25) = 1.125; s = sqrt(.25)
        ("flow_grpo", 1.0, 1.125, 0.5),
        # x0 = 1.5, score = -(2 - .75) / .25 = -5, mean = 2 - .25 - .5 * .16 * -5 * -.25
        ("dance", 0.4, 1.65, 0.2),
        # x0 = 1.5, x1 = 2.5; std = .25 sin(pi/3); mean = .75 x0 + .25 cos(pi/3) x1 = 1.125 + .3125
        ("cps", 2 / 3, 1.4375, 0.25 * math.sin(math.pi / 3)),
    ],
)
def test_a_step_by_hand(rule, level, wanted, deviation):
    x, v, noise = (torch.tensor([[value]], dtype=torch.float64) for value in (2.0, 1.0, 1.0))
    step = sde_step(x, v, 0.5, 0.25, level, rule=rule, noise=noise)
    assert step.mean.item() == pytest.approx(wanted, abs=1e-14)
    assert step.std.item() == pytest.approx(deviation, abs=1e-14)
    assert step.prev.item() == pytest.approx(wanted + deviation, abs=1e-14)
    first = sde_step(x, v, 1.0, 0.75, 0.7, rule="flow_grpo", noise=noise)  # at sigma 1 it divides by the next
    assert first.std.item() == pytest.approx(0.7 * math.sqrt(1 / 0.25) * math.sqrt(0.25), abs=1e-14)


@pytest.mark.parametrize(
    "scheduler",
    [FlowMatchEulerDiscreteScheduler(shift=1.43), UniPCMultistepScheduler(**EULER_STEPS, flow_shift=1.0)],
    ids=["rounded", "unipc"],
)
def test_a_first_sigma_just_below_1_is_stepped_from_as_1_is(scheduler):
    x, v, noise = latents()
    scheduler.set_timesteps(10)
    sigma, sigma_next = scheduler.sigmas[:2]
    assert 0.999995 < sigma < 1
    for below, one in zip(sde_step(x, v, sigma, sigma_next, 0.7, noise=noise),
                          sde_step(x, v, 1.0, sigma_next, 0.7, noise=noise)):  # fmt: skip
        torch.testing.assert_close(below, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eta", (0.3, 1.0))
def test_ddim_is_the_stochastic_step_of_the_stock_scheduler(eta):
    """DDPO's authors sample by it with eta 1."""
    scheduler = DDIMScheduler(clip_sample=False, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    scheduler.set_timesteps(50)
    x, eps, noise = latents(dtype=torch.float64)
    time = int(scheduler.timesteps[20])
    stock = scheduler.step(eps, time, x, eta=eta, variance_noise=noise).prev_sample
    sigma, sigma_next = (float((1 - scheduler.alphas_cumprod[t].double()).sqrt()) for t in (time, time - 20))
    ours = sde_step(x, eps, sigma, sigma_next, eta, rule="ddim", noise=noise).prev
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)  # the scheduler holds alphas in fp32


def test_reflow_noises_the_predicted_data_anew():
    x, v, noise = latents(dtype=torch.float64)
    step = sde_step(x, v, 0.8, 0.6, 1.0, rule="reflow", noise=noise)
    torch.testing.assert_close(step.prev, 0.4 * (x - 0.8 * v) + 0.6 * noise, rtol=1e-14, atol=0)
    data, first = torch.randn_like(x), torch.randn_like(x)  # with the true velocity the old noise is gone
    exact = sde_step(0.2 * data + 0.8 * first, first - data, 0.8, 0.6, 1.0, rule="reflow", noise=noise)
    torch.testing.assert_close(exact.prev, 0.4 * data + 0.6 * noise, rtol=1e-12, atol=1e-14)


def test_refusals():
    x, v, noise = latents()
    with pytest.raises(ConfigError, match="unknown"):
        sde_step(x, v, 0.8, 0.6, 0.5, rule="flowgrpo", noise=noise)
    with pytest.raises(ConfigError, match="no noise"):
        sde_step(x, v, 0.8, 0.6, 0.0, noise=noise)
    assert sde_step(x, v, 0.8, 0.6, 0.0, prev_sample=x).log_prob.isnan().all()  # the step is then skipped
    with pytest.raises(ConfigError, match="reduction"):
        sde_step(x, v, 0.8, 0.6, 0.5, noise=noise, reduction="max")
    with pytest.raises(ValueError, match="either"):
        sde_step(x, v, 0.8, 0.6, 0.5)
