"""The sampler against models whose answer is known."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.diffusion_sampling import DiffusionBatch, NoiseConfig, SamplingConfig
from lightrft_visual.models.diffusion.layers import flow_match_schedule
from lightrft_visual.rollout.diffusion_sampler import DiffusionSampler, sample_generators, sde_step, window_start


class Gaussian:
    """Data N(m, s²): v = E[noise - data | x], in closed form."""

    family = SimpleNamespace(
        prediction="flow",
        default_schedule=lambda num_steps, latent_shape, flow_shift: flow_match_schedule(num_steps, flow_shift or 1.0),
        flow_shift=lambda latent_shape, num_steps: 3.0,
        starting_scale=lambda sigma: 1.0,
    )

    def __init__(self, mean=0.5, std=0.8):
        self.mean, self.std = mean, std

    def velocity(self, latents, timesteps, conditions, guidance_scale):
        sigma = (timesteps / 1000).to(latents.dtype).view(-1, *([1] * (latents.dim() - 1)))
        variance = (1 - sigma) ** 2 * self.std**2 + sigma**2
        centred = (latents - (1 - sigma) * self.mean) / variance
        return sigma * centred - (self.mean + (1 - sigma) * self.std**2 * centred)


def batch(count=4, shape=(2, 4, 4), **extra):
    return DiffusionBatch({"text": torch.zeros(count, 3)}, shape, count, **extra)


def draw(trajectory="sde", steps=6, count=4, noise=None, seeds=None, **extra):
    sampler = DiffusionSampler(SamplingConfig(steps, trajectory=trajectory), noise)
    return sampler.sample(Gaussian(), batch(count), generator=sample_generators(1, 0, seeds or range(count)), **extra)


@pytest.mark.parametrize("trajectory", ("sde", "dance"))
def test_sde_marginals_match_the_data(trajectory):
    sampler = DiffusionSampler(SamplingConfig(1000, trajectory=trajectory), NoiseConfig(noise_level=0.5))
    start = batch(1, (30_000,))
    result = sampler.sample(Gaussian(), start, generator=torch.Generator().manual_seed(3))
    assert result.latents.std().item() == pytest.approx(0.8, rel=0.01)
    assert result.latents.mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_last_step_is_not_drawn_and_neither_an_ode_nor_finished_samples_keep_a_path():
    result = draw()
    assert result.trajectory.shape == (4, 7, 2, 4, 4) and result.log_probs.shape == (4, 6)
    assert result.trajectory.dtype == result.log_probs.dtype == torch.float32
    assert result.stochastic.tolist() == [True] * 5 + [False]
    assert not result.log_probs[:, -1].any() and torch.equal(result.trajectory[:, -1], result.latents)
    finished = draw(noise=NoiseConfig(keep_path=False))
    for pathless in (draw("ode"), finished):
        assert pathless.trajectory is None and pathless.log_probs is None
    assert torch.equal(result.latents, finished.latents)
    assert result.means is None and draw(noise=NoiseConfig(keep_means=True)).means.shape == (4, 6, 2, 4, 4)


@pytest.mark.parametrize(
    "trajectory,rule", (("sde", "flow_grpo"), ("sde_reflow", "reflow"), ("dance", "dance"), ("cps", "cps"))
)
def test_replay_gives_the_log_probs_exactly(trajectory, rule):
    result = draw(trajectory)
    sigmas = torch.cat([result.sigmas, torch.zeros(1)])
    for index in range(5):
        x = result.trajectory[:, index]
        v = Gaussian().velocity(x, result.timesteps[index].expand(4), {}, 1.0)
        step = sde_step(x, v, sigmas[index].expand(4), sigmas[index + 1].expand(4), 0.7, rule=rule,
                        prev_sample=result.trajectory[:, index + 1])  # fmt: skip
        assert torch.equal(step.log_prob, result.log_probs[:, index])


def test_a_sample_depends_on_its_index_alone():
    together, alone = draw(count=4), draw(count=2, seeds=[3, 1])
    torch.testing.assert_close(together.latents[[3, 1]], alone.latents)
    torch.manual_seed(99)
    assert torch.equal(draw(count=4).latents, together.latents)


def test_the_batch_stays_as_it_was_and_no_gradient_is_recorded():
    start = torch.randn(4, 2, 4, 4, requires_grad=True)
    given = batch(latents=start)
    before = start.detach().clone()
    result = DiffusionSampler(SamplingConfig(3)).sample(Gaussian(), given, generator=torch.Generator())
    assert given.latents is start and torch.equal(start.detach(), before) and not result.latents.requires_grad


def test_a_window_draws_its_steps_only():
    result = draw(noise=NoiseConfig(window_size=2), window=1)
    assert result.stochastic.tolist() == [False, True, True, False, False, False]
    assert result.log_probs[0].ne(0).tolist() == result.stochastic.tolist()
    assert places(10, window_size=2) == {0, 1, 2, 3}  # inside the first half, as in Flow-GRPO's code
    assert places(10, window_size=2, window_range=(4, 9)) == {4, 5, 6, 7}
    assert places(5, window_size=4) == {0} == places(5)
    assert places(10, window_size=2, window_move="anywhere") == set(range(8))


def places(num_steps, **noise):
    return {window_start(num_steps, NoiseConfig(**noise), 1, step) for step in range(60)}


def test_a_sliding_window_is_mixgrpos():
    """l moves by the stride after every interval of policy steps, until the window ends before the last step."""
    slide = NoiseConfig(window_size=3, window_move="slide", window_interval=2, window_stride=2)
    assert [window_start(8, slide, 1, step) for step in range(10)] == [0, 0, 2, 2, 4, 4, 4, 4, 4, 4]
    again = NoiseConfig(window_size=3, window_move="cycle", window_interval=1)
    assert [window_start(8, again, 1, step) for step in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    bounded = NoiseConfig(window_size=2, window_move="slide", window_interval=1, window_range=(2, 5))
    assert [window_start(8, bounded, 1, step) for step in range(4)] == [2, 3, 3, 3]


def test_flow_match_euler_has_the_models_shift():
    assert flow_match_schedule(2, shift=3.0)[1].tolist() == pytest.approx([1.0, 0.75])
    sampler = DiffusionSampler(SamplingConfig(4, scheduler="flow_match_euler"))
    assert torch.equal(sampler.schedule(Gaussian(), (2,))[1], flow_match_schedule(4, 3.0)[1])
    own = DiffusionSampler(SamplingConfig(4, scheduler="flow_match_euler", flow_shift=2.0))
    assert torch.equal(own.schedule(Gaussian(), (2,))[1], flow_match_schedule(4, 2.0)[1])


@pytest.mark.parametrize("shift", (3.0, 8.0))
def test_the_stock_schedule_is_that_of_the_stock_scheduler(shift):
    stock = FlowMatchEulerDiscreteScheduler(shift=shift)
    stock.set_timesteps(25)
    sampler = DiffusionSampler(SamplingConfig(25, scheduler="flow_match_euler_stock", flow_shift=shift))
    timesteps, sigmas = sampler.schedule(Gaussian(), (2,))
    torch.testing.assert_close(sigmas, stock.sigmas[:-1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(timesteps, stock.timesteps, rtol=1e-5, atol=1e-3)
    inherited = DiffusionSampler(SamplingConfig(25, scheduler="flow_match_euler_stock"))
    assert (inherited.schedule(Gaussian(), (2,))[1][-1] == sigmas[-1]) == (shift == 3.0)  # the model's own


@pytest.mark.parametrize(
    "given,timesteps,sigmas",
    (
        ({"sigmas": [1.0, 0.4]}, [1000.0, 400.0], [1.0, 0.4]),
        ({"timesteps": [900.0, 300.0]}, [900.0, 300.0], [0.9, 0.3]),
        ({"timesteps": [999, 500, 500], "sigmas": [1.0, 0.5, 0.4]}, [999.0, 500.0, 500.0], [1.0, 0.5, 0.4]),
    ),
)
def test_given_schedules_are_what_the_model_is_told(given, timesteps, sigmas):
    result = DiffusionSampler(SamplingConfig(**given)).sample(Gaussian(), batch(), generator=torch.Generator())
    assert result.timesteps.tolist() == timesteps and result.sigmas.tolist() == pytest.approx(sigmas)


@pytest.mark.parametrize(
    ("sigmas", "trajectory", "window", "said"),
    [
        ([0.9, 0.3, 0.01], "sde", None, "from sigma 0.9 to 0.3 adds noise of deviation 1.63"),
        ([1.0, 0.999, 0.5, 0.1], "sde", None, "from sigma 0.999 to 0.5"),
        ([0.9, 0.3, 0.01], "ode", None, ""), ([0.9, 0.3, 0.01], "dance", None, ""), ([1.0, 0.3, 0.01], "sde", None, ""),
        ([0.9, 0.3, 0.1, 0.01], "sde", (1, 3), ""),
    ],
)  # fmt: skip
def test_a_step_that_adds_more_noise_than_there_is_is_named(caplog, sigmas, trajectory, window, said):
    noise = NoiseConfig(window_size=window and 1 or 0, window_range=window)
    DiffusionSampler(SamplingConfig(sigmas=sigmas, trajectory=trajectory), noise).say_noise(Gaussian(), (2,))
    assert said in caplog.text if said else not caplog.text


@pytest.mark.parametrize("mapping", ({"timesteps": [900, 300, 10]}, {"num_steps": 8, "sigmas": [0.9, 0.3, 0.01]}))
def test_a_given_schedule_says_how_many_steps_there_are(mapping):
    config = SamplingConfig.from_mapping({**mapping, "trajectory": "sde"})
    sampler = DiffusionSampler(config, NoiseConfig(window_size=1))
    result = sampler.sample(Gaussian(), batch(), generator=sample_generators(1, 0, range(4)), window=1)
    assert config.num_steps == config.moving_steps == len(result.timesteps) == 3
    assert result.trajectory.shape[1] == 4 and result.stochastic.tolist() == [False, True, False]
    assert dataclasses.replace(config, trajectory="ode").num_steps == 3


def test_a_closing_0_is_a_step_of_no_length():
    """The step before it is the one that reaches the data: deterministic, as the last step always is."""
    with_zero, without = (
        DiffusionSampler(SamplingConfig(sigmas=sigmas, trajectory="sde")).sample(
            Gaussian(), batch(), generator=sample_generators(1, 0, range(4))
        )
        for sigmas in ([1.0, 0.6, 0.2, 0.0], [1.0, 0.6, 0.2])
    )
    assert with_zero.sigmas.tolist()[-1] == with_zero.timesteps.tolist()[-1] == 0.0
    assert torch.equal(with_zero.latents, without.latents) and with_zero.trajectory.shape[1] == 5
    assert with_zero.stochastic.tolist() == [True, True, False, False]
    assert torch.equal(with_zero.log_probs[:, :3], without.log_probs) and not with_zero.log_probs[:, 3].any()


@pytest.mark.parametrize("settings", ({"sigmas": [0.9, 0.0]}, {"sigmas": [0.9]}, {"num_steps": 1}))
def test_a_stochastic_trajectory_needs_a_step_that_can_be_drawn(settings):
    with pytest.raises(ConfigError, match="at least 2"):
        DiffusionSampler(SamplingConfig(trajectory="sde", **settings))
    assert DiffusionSampler(SamplingConfig(**settings))


@pytest.mark.parametrize("trajectory,noise,message", (
    *(("sde", {"window_size": 2, "window_range": within}, "window") for within in ((0, 6), (3, 4), (-1, 3))),
    ("sde", {"window_size": 0, "window_range": (0, 3)}, "window"),
    *((trajectory, {"noise_level": 0.0}, "noise_level") for trajectory in ("sde", "sde_reflow", "cps")),
    *(("cps", {"noise_level": level}, "noise_level") for level in (2.0, 3.0, float("nan"), float("inf"))),
))  # fmt: skip
def test_a_range_that_cannot_hold_the_window_and_noise_without_deviation_are_refused(trajectory, noise, message):
    with pytest.raises(ConfigError, match=message):
        DiffusionSampler(SamplingConfig(6, trajectory=trajectory), NoiseConfig(**noise))
    assert DiffusionSampler(SamplingConfig(trajectory="cps"), NoiseConfig(noise_level=1.5))


@pytest.mark.parametrize("mapping,message", (
    ({"num_stepz": 3}, "num_steps"),
    ({"num_steps": 3, "timesteps": [900, 500, 100], "sigmas": [0.9, 0.5]}, "equal length"),
    ({"sigmas": [0.9, 0.0, 0.0]}, "fall strictly"),
    ({"sigmas": [1.2, 0.5]}, "0 to 1"),
    ({"sigmas": [0.9, float("nan")]}, "finite"),
    ({"sigmas": []}, "empty"),
    ({"timesteps": [900, 950], "sigmas": [0.9, 0.5]}, "timesteps must not rise"),
    ({"trajectory": "sdee"}, "trajectory"),
))  # fmt: skip
def test_wrong_configs_are_refused(mapping, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig.from_mapping(mapping)
