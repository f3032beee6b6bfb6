"""NoisyRollout: the schedule and the noise of the paper, and rollouts of which only generation saw a noisy image."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft_visual.experience.rollouts import (
    Completion,
    PromptBatch,
    PromptFeatures,
    Rollout,
    SamplingSettings,
    collate,
)
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer
from lightrft_visual.rollout.engine import RolloutStage
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor
from lightrft_visual.rollout.parity import RolloutCheck
from lightrft_visual.trainer.features.noisy_rollouts import NoisyRolloutsHook, kept_signal, noisy
from lightrft_visual.trainer.vl.updates import comparable

IMAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n<|im_start|>assistant\n"
TEXT = "<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n"


def half_of(samples: int, processor=None) -> NoisyRolloutsHook:
    return NoisyRolloutsHook(0.5, 500, 60, samples, processor)


def test_the_schedule_is_the_papers_sigmoid():
    for step in (0, 20, 40, 59):
        expected = 500 * (1 - 1 / (1 + math.exp(-30 * (step - 40) / 60)))
        assert half_of(8).strength(step) == int(expected)
    assert [half_of(8).strength(step) for step in (0, 40, 59)] == [499, 250, 0]
    assert [half_of(n).count for n in (8, 3, 2)] == [4, 2, 1]


def test_the_noise_is_a_step_of_the_forward_process():
    betas = [0.00001 + (0.005 - 0.00001) / (1 + math.exp(-(-6 + 12 * i / 999))) for i in range(301)]
    kept = math.prod(1 - beta for beta in betas)
    assert kept_signal()[300].item() == pytest.approx(kept, abs=1e-9)
    grey = Image.fromarray(np.full((96, 96, 3), 128, dtype=np.uint8))
    found = np.array(noisy(grey, 300, seed=1)) / 255
    assert found.shape == (96, 96, 3)
    inside = (found > 0) & (found < 1)
    assert inside.mean() > 0.95
    assert found.mean() == pytest.approx(math.sqrt(kept) * 128 / 255, abs=0.01)
    assert found.std() == pytest.approx(math.sqrt(1 - kept), rel=0.05)
    assert noisy(grey, 300, seed=1).tobytes() == noisy(grey, 300, seed=1).tobytes()
    assert noisy(grey, 300, seed=1).tobytes() != noisy(grey, 300, seed=2).tobytes()
    weak = np.abs(np.array(noisy(grey, 0, seed=1)).astype(int) - 128)
    assert weak.max() <= 5  # the first step is almost none


class Asked:
    """An engine that notes what it was asked, and answers with the prompt's own ids."""

    def __init__(self, streams: bool):
        self.streams, self.calls = streams, []

    def generate(self, prompts, settings, finished=lambda number, responses: None):
        self.calls.append((prompts, settings.n))
        made = [[Completion([5], [-0.5], "x", False, list(each.token_ids))] * settings.n for each in prompts]
        for number, responses in enumerate(made):
            finished(number, responses)
        return made


@pytest.fixture(scope="module")
def data():
    tokenizer = build_tokenizer()
    return MultimodalDataProcessor(tokenizer, build_processor("qwen2_5_vl", tokenizer), 256)


@pytest.mark.parametrize("streams", [False, True])
def test_only_generation_sees_the_noisy_image(data, streams):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8))
    batch = PromptBatch.of([IMAGE, TEXT], [[image], None], ids=torch.tensor([7, 9]))
    engine, told = Asked(streams), []
    stage = RolloutStage(engine, data, run_seed=3)
    hook = half_of(4, data)
    hook.setup(SimpleNamespace(step=lambda: 40))
    asked, noted = hook.on_prompts(stage.requests(batch)), lambda first, made: told.append((first, len(made)))
    rollouts = stage.draw(asked, SamplingSettings(n=4), policy_version=40, finished=noted)
    (clean, clean_n), (copies, noisy_n) = engine.calls
    assert (clean_n, noisy_n) == (2, 2) and told == [(0, 4), (4, 4)]
    assert copies[0].images[0].tobytes() != image.tobytes() == clean[0].images[0].tobytes()
    assert not copies[1].images and all(a.seed != b.seed for a, b in zip(clean, copies))
    assert copies[0].token_ids == clean[0].token_ids
    assert not torch.equal(copies[0].vision.get("pixel_values"), clean[0].vision.get("pixel_values"))
    assert [each.sample_id for each in rollouts] == [28, 29, 30, 31, 36, 37, 38, 39]
    assert [each.distorted for each in rollouts] == [False, False, True, True] + [False] * 4
    assert all(each.prompt is clean[0] for each in rollouts[:4])  # rewards and the update read this
    assert stage.generate(batch, SamplingSettings(n=4))[3].distorted is False  # as an evaluation asks


def test_the_engines_word_for_a_noisy_image_is_not_held_against_the_trainer():
    prompt = PromptFeatures("", [1], 0)
    rollouts = [Rollout(prompt, [2, 3], [-1.0, -1.0], "", False, k, distorted=k == 1) for k in range(2)]
    batch, check = collate(rollouts, 0, vision=False), RolloutCheck(None, None)
    ours = torch.tensor([[-1.0, -1.0], [-4.0, -4.0]])
    check.add(ours, batch.rollout_log_probs, comparable(batch, batch.action_mask))
    assert check.compared and check.largest == 0.0
    check.add(ours, batch.rollout_log_probs, batch.action_mask)
    assert check.largest == 3.0
