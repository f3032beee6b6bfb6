"""Losses and gradients of one actor over the same samples in several forms, and whether they are the same."""

import torch
from peft import LoraConfig, get_peft_model

from lightrft_visual.experience.rollouts import ScoringRule
from lightrft_visual.experience.types import ModelInputs
from lightrft_visual.models.vlm.actor import Actor

PLAIN = ScoringRule()


@torch.no_grad()
def with_adapters(model, std: float = 0.1):
    """A fresh LoRA changes nothing: its B is zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=std)
    return model


def adapters(model, dropout: float = 0.0):
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout))
    return with_adapters(model)


def loss_and_gradients(actor: Actor, batches: list[ModelInputs], rule=PLAIN) -> tuple[float, dict]:
    """A loss that weighs every token of every sample differently, over micro-batches."""
    actor.zero_grad(set_to_none=True)
    total = 0.0
    for inputs in batches:
        share = weighed(actor(inputs, rule), inputs)
        share.backward()
        total += share.item()
    return total, {n: p.grad.clone() for n, p in actor.named_parameters() if p.grad is not None}


def weighed(output, inputs: ModelInputs) -> torch.Tensor:
    rows = (inputs.sample_ids % 10 + 1).unsqueeze(1) * torch.arange(1, inputs.action_mask.shape[1] + 1)
    return ((output.log_probs * rows.cos() - 0.1 * output.entropy) * inputs.action_mask).sum() / 30


def assert_same(left, right, tolerance: float) -> None:
    assert abs(left[0] - right[0]) <= tolerance
    assert left[1].keys() == right[1].keys()
    for name, gradient in left[1].items():
        largest = max(1.0, gradient.abs().max().item())
        assert (gradient - right[1][name]).abs().max() <= tolerance * largest, name
