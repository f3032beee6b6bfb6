"""The optimizer step's gradients do not depend on how the train batch is cut or laid out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import actor_of, checkpoint_of, mixed_prompts, rollouts_of

from lightrft_visual.batches.prompts import PromptBatch
from lightrft_visual.batches.rollouts import collate
from lightrft_visual.batches.sampling import ScoringRule
from lightrft_visual.config.vl import AlgorithmConfig
from lightrft_visual.observe.metrics import MetricsAccumulator
from lightrft_visual.replay.buffer import NaiveReplayBuffer
from lightrft_visual.trainer.vl.updates import PolicyUpdate, plan_batch


class PlainEngine:
    """An actor with ordinary backward passes in the place of DeepSpeed."""

    def __init__(self, actor):
        self.module = actor

    def __call__(self, *arguments, **named):
        return self.module(*arguments, **named)

    def accumulate(self, loss, last):
        loss.backward()

    def step(self):
        return SimpleNamespace(applied=True)


def eight_prompts() -> PromptBatch:
    four = mixed_prompts(videos=False)
    return PromptBatch.of(four.prompts * 2, four.images * 2)


def gradients(checkpoint, micro_batch: int, packed: bool, prompts: PromptBatch) -> tuple[float, dict]:
    """(loss, {name: gradient}) of one step on eight samples with made-up advantages."""
    actor = actor_of(checkpoint)
    buffer = NaiveReplayBuffer(micro_batch, packing_samples=packed)
    experience = collate(rollouts_of(checkpoint, prompts), checkpoint.tokenizer.pad_token_id, checkpoint.vision)
    make = torch.Generator().manual_seed(3)
    shape = experience.action_mask.shape
    experience.action_log_probs = -2 + torch.randn(shape, generator=make)
    experience.advantages = torch.randn(shape, generator=make)
    experience.valid = torch.ones(len(prompts), dtype=torch.bool)
    experience.info = {}
    buffer.append(experience)
    metrics = MetricsAccumulator()
    config = AlgorithmConfig(eps_clip=3.0, entropy_coef=0.1)
    (micro_batches,) = buffer.plan(0)
    batch = plan_batch(buffer, micro_batches, config, max_tokens=6)
    assert len(micro_batches) == -(-len(prompts) // micro_batch)
    PolicyUpdate(PlainEngine(actor), config, ScoringRule(temperature=0.7)).step(buffer, batch, 0.0, metrics, True)
    found = {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}
    return metrics.reduce()["loss"], found


def assert_same(left: tuple[float, dict], right: tuple[float, dict], tolerance: float) -> None:
    assert left[0] == pytest.approx(right[0], abs=tolerance)
    assert left[1].keys() == right[1].keys() and left[1]
    largest = max(gradient.abs().max().item() for gradient in left[1].values())
    assert largest > 1e-3
    for name, gradient in left[1].items():
        assert (gradient - right[1][name]).abs().max().item() <= tolerance * max(1.0, largest), name


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batches_of_any_size_give_the_same_gradients(cache_root, tmp_path, micro_batch):
    checkpoint = checkpoint_of(tmp_path, "qwen2_5_vl")
    whole = gradients(checkpoint, 8, False, eight_prompts())
    assert_same(whole, gradients(checkpoint, micro_batch, False, eight_prompts()), 1e-6)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("micro_batch", [8, 2])
def test_packed_gradients_are_the_padded_ones(tmp_path, family, micro_batch):
    checkpoint = checkpoint_of(tmp_path, family)
    padded = gradients(checkpoint, 8, False, eight_prompts())
    assert_same(padded, gradients(checkpoint, micro_batch, True, eight_prompts()), 1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("packed", [False, True])
def test_text_alone_gives_every_weight_of_the_vision_tower_a_zero_gradient(tmp_path, family, packed):
    """All ranks must reduce the same gradients, whether their micro-batch has an image or not."""
    checkpoint = checkpoint_of(tmp_path, family)
    text = PromptBatch.of([eight_prompts().prompts[0]] * 2)
    _, of_text = gradients(checkpoint, 2, packed, text)
    _, of_images = gradients(checkpoint, 8, packed, eight_prompts())
    assert of_text.keys() == of_images.keys()
    assert all(not gradient.any() for name, gradient in of_text.items() if ".visual." in name)
