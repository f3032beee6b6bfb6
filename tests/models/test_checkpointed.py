"""Blocks that are checkpointed whole or but for attention: the same results, and what runs and is kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from equality import adapters, assert_same, loss_and_gradients, weighed
from tiny_models import checkpoint_of, features_of, inputs_of, prompts_for
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft_visual.config.vl import ModelConfig
from lightrft_visual.errors import ConfigError
from lightrft_visual.experience.rollouts import Rollout, ScoringRule
from lightrft_visual.models.checkpointed import KeptAttention, checkpoint_blocks, dropped_out, keeps
from lightrft_visual.models.loading import load_transformer
from lightrft_visual.models.vlm.actor import Actor, Critic
from lightrft_visual.trainer.features.compiled_blocks import compile_blocks

HOW = ("none", "attention", "full")


class Calls(TorchDispatchMode):
    """Counts calls of attention, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if "_scaled_dot_product_" in name:
            self.backward += "backward" in name
            self.forward += "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("models"), "qwen2_5_vl")


def actor_of(checkpoint, how: str, adapted: bool = False, share: bool = False, dropout: float = 0.0) -> Actor:
    model = load_transformer(checkpoint.path, ModelConfig(gradient_checkpointing=how), torch.float32)
    model = adapters(model, dropout) if adapted else model
    return Actor(model, [], checkpoint.eos_ids, share).train()


def rollouts(checkpoint) -> list[Rollout]:
    """Two responses to each prompt: text alone, one image, several."""
    draw, prompts = np.random.default_rng(3), features_of(checkpoint, prompts_for(checkpoint, False))
    return [
        Rollout(
            replace(prompt, group_id=index), draw.integers(0, 256, draw.integers(1, 8)).tolist(), None, "", False,
            sample_id=index + 7 * turn,
        )
        for index, prompt in enumerate(prompts)
        for turn in range(2)
    ]  # fmt: skip


def counted(actor: Actor, inputs) -> tuple[tuple, Calls, int]:
    """((loss, gradients), calls of attention, those before backward) of a forward and its backward."""
    actor.zero_grad(set_to_none=True)
    with Calls() as calls:
        loss = weighed(actor(inputs, ScoringRule()), inputs)
        before = calls.forward
        loss.backward()
    return (loss.item(), {n: p.grad.clone() for n, p in actor.named_parameters() if p.grad is not None}), calls, before


@pytest.mark.parametrize("packed,share,adapted,compiled", [
    (True, True, False, False), (True, False, True, False), (False, False, True, False), (True, True, True, True),
    (False, False, False, True),
])  # fmt: skip
def test_losses_and_gradients_are_the_same_and_attention_runs_once_where_it_is_kept(
    checkpoint, packed, share, adapted, compiled
):
    torch._dynamo.reset()
    inputs, results = inputs_of(checkpoint, rollouts(checkpoint)[:7], packed), {}
    for how in HOW:
        actor = actor_of(checkpoint, how, adapted, share)
        if compiled:
            compile_blocks(actor, "aot_eager")
        results[how], calls, once = counted(actor, inputs)
        assert once > 0 and calls.forward == {"none": 1, "attention": 1, "full": 2}[how] * once
    for how in ("attention", "full"):
        assert_same(results[how], results["none"], 1e-6)
