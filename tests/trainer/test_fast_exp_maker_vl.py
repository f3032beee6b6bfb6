"""The experience maker as a library, on a tiny model with the transformers engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import actor_of, checkpoint_of, turn

from lightrft_visual.algorithms.kl import FixedKLController
from lightrft_visual.experience.rollouts import SamplingSettings
from lightrft_visual.trainer.fast_exp_maker import FastExperienceMaker, MakerSettings

PROMPTS = [turn("how many?"), turn("where?")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("tiny"), "qwen2")


def maker(checkpoint, reward_fn, **settings) -> FastExperienceMaker:
    return FastExperienceMaker(
        actor_of(checkpoint), None, None, None, checkpoint.tokenizer, 64, FixedKLController(0.0),
        SimpleNamespace(device=torch.device("cpu")), reward_fn=reward_fn,
        settings=MakerSettings(sampling=SamplingSettings(n=2, max_new_tokens=4), **settings),
    )  # fmt: skip


def by_place(completions):
    return [float(place) for place in range(len(completions))]


def test_equal_prompts_of_two_calls_are_sampled_anew(checkpoint):
    one = maker(checkpoint, by_place)
    first, second = one.make_experience_list(PROMPTS), one.make_experience_list(PROMPTS)
    assert not torch.equal(first[0].sequences, second[0].sequences)
    assert first[0].group_id.unique().tolist() == [0, 1] and second[0].group_id.unique().tolist() == [2, 3]
    again = maker(checkpoint, by_place)
    assert torch.equal(again.make_experience_list(PROMPTS)[0].sequences, first[0].sequences)
    assert [each.sample_ids.tolist() for each in again.generate_samples(PROMPTS)] == [[4, 5, 6, 7]]
