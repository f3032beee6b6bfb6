"""Settings and metrics of FastVideo, DiffusionNFT and Flow-GRPO mean here what they mean there, worked out by hand."""

from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightrft_visual.algorithms.diffusion.advantages import group_metrics
from lightrft_visual.algorithms.diffusion.denoising_batch import first_share, noisy_steps, random_share
from lightrft_visual.config.diffusion import DiffusionRunConfig, trained_steps
from lightrft_visual.config.load import parse_run
from lightrft_visual.errors import ConfigError
from lightrft_visual.rollout.diffusion_sampler import SamplingConfig
from lightrft_visual.trainer.features.trained_prompts import TrainedPromptsHook
from lightrft_visual.trainer.hooks import StepData


@pytest.mark.parametrize(
    "raw,expected",
    [
        (None, SamplingConfig()),
        ({"num_steps": "12"}, SamplingConfig(num_steps=12)),
        ({"num_steps": None, "trajectory": None, "sigmas": None}, SamplingConfig()),
        ({"flow_shift": "inherit"}, SamplingConfig()),
        ({"flow_shift": "3"}, SamplingConfig(flow_shift=3.0)),
        ({"scheduler": " Flow_Match_Euler "}, SamplingConfig(scheduler="flow_match_euler")),
        ({"timesteps": ["900", "300", 10]}, SamplingConfig(timesteps=[900.0, 300.0, 10.0])),
        ({"timesteps": OmegaConf.create(["900", 300])}, SamplingConfig(timesteps=[900.0, 300.0])),
        ({"sigmas": np.array([0.75, 0.5])}, SamplingConfig(sigmas=[0.75, 0.5])),
        ({"sigmas": torch.tensor([0.75, 0.5])}, SamplingConfig(sigmas=(0.75, 0.5))),
    ],
)
def test_a_section_of_sampling_is_read(raw, expected):
    assert SamplingConfig.from_mapping(raw) == expected


def test_arrays_and_tensors_are_schedules_too():
    given = torch.linspace(1.0, 0.25, 4)
    for values in (given, given.numpy(), OmegaConf.create(given.tolist())):
        assert SamplingConfig(sigmas=values) == SamplingConfig(sigmas=[1.0, 0.75, 0.5, 0.25])
    assert SamplingConfig(timesteps=np.array([900, 300])).num_steps == 2
    with pytest.raises(ConfigError, match="sigmas is '0.5'; it must be a list of numbers"):
        SamplingConfig(sigmas="0.5")


@pytest.mark.parametrize(
    "raw,words",
    [
        ([], "sampling is a list"),
        ({"num_step": 3}, "num_steps"),
        ({"num_steps": "many"}, "num_steps is 'many'; it must be a whole number"),
        ({"num_steps": 1.5}, "num_steps is 1.5"),
        ({"num_steps": 0}, "num_steps is 0; it must be positive"),
        ({"flow_shift": "wide"}, "flow_shift is 'wide'; it must be a number, or 'inherit'"),
        ({"timesteps": "900"}, "timesteps is '900'; it must be a list of numbers"),
        ({"sigmas": [None]}, "sigmas is"),
        ({"trajectory": ["ode"]}, "trajectory is"),
    ],
)
def test_a_wrong_section_of_sampling_is_refused_in_words(raw, words):
    with pytest.raises(ConfigError) as error:
        SamplingConfig.from_mapping(raw)
    assert words in str(error.value)


def test_fields_of_sampling_given_from_python_are_checked_as_those_of_a_section():
    assert SamplingConfig("10", flow_shift="3") == SamplingConfig(10, flow_shift=3.0)
    assert SamplingConfig(flow_shift="inherit") == SamplingConfig()
    assert SamplingConfig(torch.tensor(10), flow_shift=np.array(3.0)) == SamplingConfig(10, flow_shift=3.0)
    for wrong, words in (
        ({"num_steps": 2.5}, "num_steps is 2.5; it must be a whole number"),
        ({"num_steps": None}, "num_steps is None"),
        ({"num_steps": torch.tensor([10])}, "it must be a whole number"),
        ({"sigmas": torch.tensor(0.5)}, "it must be a list of numbers"),
        ({"flow_shift": "wide"}, "flow_shift is 'wide'; it must be a number"),
        ({"trajectory": None}, "trajectory is 'none'"),
    ):
        with pytest.raises(ConfigError, match=words):
            SamplingConfig(**wrong)


def test_the_best_rewards_of_a_group_are_those_from_a_percentile_on():
    rewards, groups = torch.tensor([1.0, 2, 2, 3, 4, 4, 4, 4]), torch.arange(8) // 4
    found = group_metrics(rewards, groups, torch.ones(8, dtype=torch.bool))
    assert found["mean_reward_100"] == 3.0
    assert found["mean_reward_50"] == pytest.approx((7 / 3 + 4) / 2)  # the median is 2, and two rewards are
    assert found["mean_reward_25"] == 3.5 and found["mean_reward_10"] == 3.5  # from 2.25 and from 2.7 on
    assert found["mean_reward_75"] == pytest.approx((7 / 3 + 4) / 2)  # from 1.75 on
    assert (found["group_size"], found["zero_std_ratio"]) == (4, 0.5)
    assert found["reward_std_mean"] == pytest.approx(0.5**0.5 / 2)


def step_of(*prompts: str) -> StepData:
    return StepData([], SimpleNamespace(requests=SimpleNamespace(prompts=list(prompts))))


def test_trained_prompts_are_counted_over_the_run_also_where_it_is_resumed():
    hook = TrainedPromptsHook()
    hook.on_experience(step_of("a cat", "a cat", "a dog"))
    assert hook.metrics() == {"trained_prompt_num": 2.0}
    again = TrainedPromptsHook()
    again.load_state_dict(hook.state_dict())
    again.on_experience(step_of("a dog", "a house"))
    assert again.metrics() == {"trained_prompt_num": 3.0}


def test_the_state_of_trained_prompts_is_not_sorted_at_each_step_and_stays_as_it_was_when_it_was_taken():
    hook, prompts = TrainedPromptsHook(), [f"a picture of {number}" for number in range(20)]
    hook.on_experience(step_of(*prompts))
    state = hook.state_dict()
    hook.on_experience(step_of("a cat"))
    assert state["seen"] == [sha256(prompt.encode()).hexdigest()[:16] for prompt in prompts]


@pytest.mark.parametrize("fraction,kept", [(0.99, 9), (1.0, 10), (0.5, 5), (0.29, 2), (0.01, 1)])
def test_a_share_of_ten_steps_of_the_schedule_is_cut(fraction, kept):
    experience = SimpleNamespace(sigmas=torch.linspace(1, 0, 11).expand(2, -1))
    assert noisy_steps(experience, fraction).tolist() == [list(range(kept))] * 2  # DiffusionNFT and FastVideo


@pytest.mark.parametrize("fraction,kept", [(0.99, 9), (1.0, 9), (0.5, 5), (0.01, 1)])
def test_flow_grpo_trains_on_the_first_steps_of_the_schedule(fraction, kept):
    stochastic = torch.arange(10) < 9  # the last one is deterministic here
    assert first_share(stochastic, fraction).tolist() == list(range(kept))


def test_dance_grpo_trains_on_a_cut_share_of_shuffled_steps():
    assert random_share(torch.arange(15).expand(2, -1), 0.65).shape == (2, 9)


@pytest.mark.parametrize(
    "flags,kept",
    [
        ("--num_steps 10 --timestep_fraction 0.99", 9),
        ("--num_steps 10 --timestep_fraction 0.5", 5),
        ("--num_steps 10 --sde_window_size 3 --timestep_fraction 0.99", 3),
        ("--diffusion_algorithm diffusion_nft --num_steps 10 --timestep_fraction 0.99", 9),
        ("--diffusion_algorithm dance_grpo --num_steps 16 --timestep_fraction 0.65", 9),
    ],
)
def test_a_plan_counts_the_steps_that_are_trained_on(flags, kept):
    argv = ["--pretrain", "m", "--prompt_data", "rows.csv", *flags.split()]
    assert trained_steps(parse_run(DiffusionRunConfig, argv, preset=None).config) == kept
